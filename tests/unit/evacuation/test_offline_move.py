"""Guests that are off: what is copied with them, and what becomes of copies that nobody needs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.builders import HOST
from tests.support.sights import answers, at, by, seen, vm
from vmckpt.errors import RemoteError
from vmckpt.evacuation import offline_move
from vmckpt.evacuation.offline_move import Ends
from vmckpt.evacuation.plan import plan as plans
from vmckpt.evacuation.plan.inventory import Known, TravelMethod
from vmckpt.evacuation.plan.placement import Unplaced
from vmckpt.evacuation.plan.plan import Checked
from vmckpt.hypervisor import domains, storage
from vmckpt.journal.records import StepState, StoredStep
from vmckpt.migration.forecast.forecast import Range
from vmckpt.migration.forecast.measure import Links
from vmckpt.migration.plan import storage_cleanup, storage_copy
from vmckpt.model.disk import NVRAM, CopyOptions, CopyPlan, DiskCopy, Drive, Place
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.guest import GuestState, Presence
from vmckpt.model.migration import LinkSeen
from vmckpt.policy.model import CopyKind
from vmckpt.remote import images, probe
from vmckpt.remote.image_copy import Content
from vmckpt.units import GIB, MIB, Bytes, BytesPerSecond, Seconds

ENDS = Ends(source=replace(HOST, name="alpha"), target=replace(HOST, name="beta"), remotes=None)

COPY = DiskCopy(
    name="vda", source="/srv/a.raw", path="/srv/a.raw", format="raw", size=Bytes(4000 * MIB),
    needed=Bytes(1100 * MIB), allocated=Bytes(1000 * MIB), full=False, options="", mode="600",
)  # fmt: skip


def drive(name: str, path: str, device: str = "disk") -> Drive:
    return Drive(
        name=name, kind="file", device=device, path=path, format="raw", read_only=False,
        encrypted=False,
    )  # fmt: skip


def known(copy: CopyKind) -> Known:
    policy = replace(by(), storage=replace(by().storage, copy=copy))
    guest = vm("a", state=GuestState.SHUT_OFF)
    return Known(name="a", guest=guest, host="alpha", policy=policy, way=TravelMethod.OFFLINE)


async def test_who_copies_needs_logins_at_both_hosts_and_who_does_not_needs_none() -> None:
    refused = await offline_move.check_move(known(CopyKind.THIN), ENDS, Links())
    assert [one.code for one in refused.blockers] == ["disks-not-seen"]
    assert "ssh" in (refused.blockers[0].hint or "")
    shared = await offline_move.check_move(known(CopyKind.SHARED), ENDS, Links())
    assert (shared.blockers, shared.sent, shared.mode) == ((), None, "offline")


@pytest.mark.parametrize(
    ("link", "limit", "total"),
    [
        (None, None, None),
        (100 * MIB, None, (10.0, 20.0)),
        (100 * MIB, 50 * MIB, (20.0, 35.0)),
        (50 * MIB, 100 * MIB, (20.0, 35.0)),
    ],
)
async def test_how_long_a_copy_takes_is_what_the_link_and_the_policy_let_through(
    monkeypatch: pytest.MonkeyPatch, link: int | None, limit: int | None,
    total: tuple[float, float] | None,
) -> None:  # fmt: skip
    async def look(*_: object) -> CopyPlan:
        return CopyPlan(copies=(COPY,))

    async def between(*_: object) -> tuple[LinkSeen | None, str | None]:
        if link is None:
            return None, "not measured"
        seen_ = LinkSeen(rate=BytesPerSecond(link), received=Bytes(1), lasted=Seconds(1.0))
        return seen_, None

    monkeypatch.setattr(offline_move, "plan_copies", look)
    links: Any = SimpleNamespace(between=between)
    one = known(CopyKind.THIN)
    most = None if limit is None else BytesPerSecond(limit)
    limits = replace(one.policy.limits, bandwidth=most)
    told = await offline_move.check_move(
        replace(one, policy=replace(one.policy, limits=limits)), ENDS, links
    )
    assert told.sent == Range(1000 * MIB, 1000 * MIB)
    assert (told.total and (told.total.low, told.total.high)) == pytest.approx(total)


@pytest.mark.parametrize(
    ("same", "copied", "unseen"),
    [
        ({"/srv/a.raw": True, "/base": True}, (), None),
        ({"/srv/a.raw": True, "/base": False}, (), "/base"),
        ({"/srv/a.raw": True}, (), "/base"),
        ({"/srv/a.raw": False, "/base": True}, ("/srv/a.raw",), None),
        ({"/srv/a.raw": False, "/base": True}, (), "/srv/a.raw"),
    ],
)
async def test_every_file_is_copied_or_seen_there_what_lies_below_as_well(
    monkeypatch: pytest.MonkeyPatch, same: dict[str, bool], copied: tuple[str, ...],
    unseen: str | None,
) -> None:  # fmt: skip
    async def drives(*_: object) -> tuple[Drive, ...]:
        return ()

    async def same_files(*_: object) -> dict[str, bool]:
        return same

    async def look(*_: object) -> CopyPlan:
        return CopyPlan(copies=tuple(replace(COPY, source=one) for one in copied))

    monkeypatch.setattr(storage, "drives", drives)
    monkeypatch.setattr(probe, "same_files", same_files)
    monkeypatch.setattr(storage_copy, "plan_copies", look)
    one = known(CopyKind.THIN)
    disk = replace(one.guest.disks[0], below=("/base",))
    remotes: Any = (object(), object())
    here = replace(ENDS.source, uri="test:///default")
    ends = Ends(source=here, target=replace(here, name="beta"), remotes=remotes)
    found = await offline_move.plan_copies(
        replace(one, guest=replace(one.guest, disks=(disk,))), ends
    )
    assert [text.text.split()[0] for text in found.findings] == ([unseen] if unseen else [])


@pytest.mark.parametrize(("exists", "unseen"), [(True, 1), (False, 0)])
async def test_firmware_that_was_never_started_has_no_file_to_carry(
    monkeypatch: pytest.MonkeyPatch, exists: bool, unseen: int
) -> None:
    """libvirt makes it when the guest starts for the first time, there as here."""

    async def drives(*_: object) -> tuple[Drive, ...]:
        return ()

    async def same_files(*_: object) -> dict[str, bool]:
        return {"/srv/a.raw": True}

    async def places(_: object, paths: list[str]) -> dict[str, Place]:
        place = Place(exists=exists, writable=True, device="1", free=Bytes(0))
        return dict.fromkeys(paths, place)

    async def look(*_: object) -> CopyPlan:
        return CopyPlan()

    monkeypatch.setattr(storage, "drives", drives)
    monkeypatch.setattr(probe, "same_files", same_files)
    monkeypatch.setattr(images, "places", places)
    monkeypatch.setattr(storage_copy, "plan_copies", look)
    one = known(CopyKind.THIN)
    here = replace(ENDS.source, uri="test:///default")
    remotes: Any = (object(), object())
    ends = Ends(source=here, target=replace(here, name="beta"), remotes=remotes)
    guest = replace(one.guest, nvram="/var/nvram/a.fd")
    assert len((await offline_move.plan_copies(replace(one, guest=guest), ends)).findings) == unseen


def test_what_keeps_a_guest_is_told_with_its_own_mend() -> None:
    finding = Finding(
        code="disk-in-the-way", severity=Severity.BLOCKER, where="beta", text="/a is there already",
        hint="move it away",
    )  # fmt: skip
    checks = {("a", "beta"): Checked(policy="p", mode="offline", blockers=(finding,))}
    its = seen(answers(at("alpha", vm("a")), at("beta")))
    left = Unplaced(tenant=its.fleet.tenants[0], why="beta: /a is there already", hint="add a host")
    assert [one.hint for one in plans.worded([left], its, checks)] == ["move it away"]
    assert plans.worded([replace(left, why="too full")], its, checks)[0].hint == "add a host"


def test_firmware_goes_with_named_disks_and_keeps_its_place() -> None:
    vars_ = drive(NVRAM, "/var/nvram/a.fd", NVRAM)
    drives = (drive("vda", "/srv/a.raw"), drive("vdb", "/srv/b.raw"), vars_)
    same = {"/srv/a.raw": False, "/srv/b.raw": True, "/var/nvram/a.fd": False}
    wish = CopyOptions(disks=("vda",), folder="/pool")
    assert [one.name for one in storage_copy.wanted(drives, same, wish)] == ["vda", NVRAM]
    assert storage_copy.path_on_target(vars_, wish) == "/var/nvram/a.fd"
    assert storage_copy.path_on_target(drives[0], wish) == "/pool/a.raw"
    seen = same | {"/var/nvram/a.fd": True}
    assert [one.name for one in storage_copy.wanted(drives, seen, wish)] == ["vda"]


@pytest.mark.parametrize(
    ("done", "now", "rate", "left", "share"),
    [
        (0, 10.0, 0, None, 0.0),
        (25 * MIB, 20.0, 2.5 * MIB, 30.0, 0.25),
        (100 * MIB, 20.0, 10 * MIB, 0.0, 1.0),
    ],
)
def test_how_far_a_copy_is(
    done: int, now: float, rate: float, left: float | None, share: float
) -> None:
    told = offline_move.progress(Bytes(done), Bytes(100 * MIB), Seconds(10.0), Seconds(now))
    assert (told.sample.bandwidth, told.estimate.high, told.done) == (rate, left, share)
    assert told.sample.remaining + told.sample.transferred == 100 * MIB


def test_a_large_image_on_a_slow_line_is_waited_for() -> None:
    content = Content(path="/a", format="raw", size=Bytes(100 * GIB), to="/b", address="beta")
    assert content.patience == Seconds(60 + 1024)
    assert replace(content, limit=BytesPerSecond(MIB // 2)).patience == Seconds(60 + 2048)
    assert replace(content, limit=BytesPerSecond(GIB)).patience == content.patience


ARRIVED = Presence(reachable=True, state=GuestState.SHUT_OFF)
NOT_THERE = Presence(reachable=True)
SILENT = Presence(reachable=False)


@pytest.mark.parametrize(
    ("there", "here", "fails", "removed", "states", "told"),
    [
        (ARRIVED, NOT_THERE, False, False, [StepState.DONE], 0),
        (NOT_THERE, ARRIVED, False, True, [StepState.UNDONE], 0),
        (NOT_THERE, ARRIVED, True, True, [], 1),
        (SILENT, ARRIVED, False, False, [], 1),
        # It may have gone on from there, with its images; or libvirt is at it.
        (NOT_THERE, NOT_THERE, False, False, [], 1),
        (NOT_THERE, SILENT, False, False, [], 1),
        (NOT_THERE, replace(ARRIVED, migrating=True), False, False, [], 1),
    ],
)
async def test_copies_stay_where_their_guest_is_and_go_elsewhere(
    monkeypatch: pytest.MonkeyPatch, there: Presence, here: Presence, fails: bool, removed: bool,
    states: list[StepState], told: int,
) -> None:  # fmt: skip
    asked: list[StoredStep] = []
    finished: list[bool] = []
    concluded: list[StepState] = []

    async def presence(hypervisor: Any, _: str) -> Presence:
        return there if hypervisor.host.name == "beta" else here

    async def unmade(_: object, step: StoredStep) -> list[str]:
        asked.append(step)
        if fails:
            raise RemoteError("beta: ssh broke")
        return []

    async def after_crash(_: object, source: str, remotes: object) -> tuple[str, ...]:
        finished.append(source == "alpha" and remotes is None)
        return ()

    @asynccontextmanager
    async def logins(*_: str) -> AsyncIterator[None]:
        if there is ARRIVED:  # what follows an arrival waits for no host that is gone
            raise RemoteError("alpha: no route to host")
        yield None

    monkeypatch.setattr(domains, "presence", presence)
    monkeypatch.setattr(storage_copy, "unmade", unmade)
    monkeypatch.setattr(storage_cleanup, "after_crash", after_crash)
    recorder: Any = SimpleNamespace(
        check=lambda: None, conclude=lambda _, state: concluded.append(state)
    )
    step = StoredStep(
        seq=3, name=offline_move.IMAGES, state=StepState.INTENDED, result=None, began_at=0.0,
        ended_at=None,
        intent={"host": "beta", "from": "alpha", "uuid": "u-a", "paths": ["/a"], "suffix": "s"},
    )  # fmt: skip
    told_ = await offline_move.undo_left(
        [step], lambda name: replace(HOST, name=name, uri="test:///default"), logins, recorder
    )
    assert (bool(asked), concluded, len(told_)) == (removed, states, told)
    assert finished == ([True] if there is ARRIVED else [])
    assert all("/a" in line for line in told_)
