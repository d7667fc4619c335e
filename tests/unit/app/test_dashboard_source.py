"""Who looks on sees what answers, and does not wait for what does not."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vmckpt.app import dashboard_source
from vmckpt.app.dashboard_source import Live
from vmckpt.errors import HostUnreachable, JournalError
from vmckpt.hypervisor import same_host
from vmckpt.inventory import Inventory
from vmckpt.journal import maintenance
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal
from vmckpt.model.guest import GuestNow, GuestState, HostNow
from vmckpt.model.host import Host
from vmckpt.model.same_host import SameUuid
from vmckpt.snapshot.verify.results import Checked
from vmckpt.units import GIB, Bytes
from vmckpt_lab.machine_speed import slowness


class Answers:
    """A host that answers, late if it is told so, or not."""

    def __init__(self, name: str) -> None:
        self.name, self.late, self.dead = name, 0.0, False
        self.asked = 0
        self.guest = name
        """The UUID of the guest that runs there."""

    async def poll(self) -> tuple[HostNow, tuple[GuestNow, ...]]:
        self.asked += 1
        await asyncio.sleep(self.late)
        if self.dead:
            raise HostUnreachable(f"{self.name} is silent", host=self.name)
        guest = GuestNow(
            name=f"on-{self.name}", uuid=self.guest, host=self.name, state=GuestState.RUNNING,
            memory=Bytes(GIB), vcpus=1,
        )  # fmt: skip
        return HostNow(name=self.name, memory=Bytes(8 * GIB)), (guest,)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Live, dict[str, Answers]]:
    monkeypatch.setenv("VMCKPT_JOURNAL", str(tmp_path / "journal.db"))
    monkeypatch.setattr(dashboard_source, "_FIRST", 0.3)
    monkeypatch.setattr(dashboard_source, "_LATER", 0.1)
    monkeypatch.setattr(dashboard_source, "_REST", 0.0)
    hosts = {name: Host(name=name, uri="test:///default") for name in ("alpha", "beta")}
    made = Live(Inventory(path=tmp_path / "hosts.yaml", hosts=hosts, observer=None))
    answers = {name: Answers(name) for name in hosts}
    monkeypatch.setattr(made, "_glancers", answers)
    return made, answers


async def test_a_host_that_takes_long_is_shown_as_it_was(
    live: tuple[Live, dict[str, Answers]],
) -> None:
    looker, answers = live
    first = await looker.fleet()
    assert [one.name for one in first.guests] == ["on-alpha", "on-beta"]
    answers["beta"].late = 5.0
    began = time.monotonic()
    later = await looker.fleet()
    assert time.monotonic() - began < 1.0 * slowness()
    assert [one.name for one in later.guests] == ["on-alpha", "on-beta"]
    await looker.fleet()
    assert (answers["alpha"].asked, answers["beta"].asked) == (3, 2)  # not asked twice at once
    await looker.close()


async def test_a_host_that_is_silent_says_why_and_comes_back(
    live: tuple[Live, dict[str, Answers]],
) -> None:
    looker, answers = live
    answers["beta"].dead = True
    found = {one.name: one.error for one in (await looker.fleet()).hosts}
    assert found == {"alpha": None, "beta": "beta is silent"}
    answers["beta"].dead = False
    again = await looker.fleet()
    assert [one.error for one in again.hosts] == [None, None]
    await looker.close()


async def test_before_the_first_answer_that_is_said(live: tuple[Live, dict[str, Answers]]) -> None:
    looker, answers = live
    answers["beta"].late = 5.0
    assert [one.error for one in (await looker.fleet()).hosts] == [None, "no answer yet"]
    await looker.close()


async def test_a_host_stays_in_maintenance_while_the_journal_is_away(
    live: tuple[Live, dict[str, Answers]], monkeypatch: pytest.MonkeyPatch
) -> None:
    looker, _ = live
    maintenance.enter("beta", "new memory")
    closed = [one.closed for one in (await looker.fleet()).hosts]
    assert closed[0] is None
    assert closed[1] is not None

    def away() -> None:
        raise JournalError("the database is down")

    with monkeypatch.context() as broken:
        broken.setattr(maintenance, "held", away)
        assert [one.closed for one in (await looker.fleet()).hosts] == closed
    maintenance.leave("beta")
    assert [one.closed for one in (await looker.fleet()).hosts] == [None, None]
    await looker.close()


async def test_no_journal_is_no_jobs_and_one_that_comes_later_is_read(
    live: tuple[Live, dict[str, Answers]], tmp_path: Path
) -> None:
    looker, _ = live
    assert list(await looker.jobs(10)) == []
    with Journal(tmp_path / "journal.db") as journal:
        first = journal.begin(NewOperation(kind="migrate", guest="web1", source="alpha"))
        journal.begin(NewOperation(kind="maintenance", guest="beta", source="beta"))
    found = await looker.jobs(10)
    assert {one.operation.guest for one in found} == {"web1", "beta"}
    assert (await looker.job(first)).view.operation.guest == "web1"
    assert (await looker.news(first, 0, 0)).samples == []
    await looker.close()


async def test_who_was_silent_for_long_is_left_alone_for_a_while(
    live: tuple[Live, dict[str, Answers]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_source, "_REST", 9.0)
    looker, answers = live
    answers["beta"].dead, answers["beta"].late = True, 0.3
    async with asyncio.timeout(2.5):
        while answers["alpha"].asked < 3:  # who answers at once is left alone for a moment, too
            await looker.fleet()
            await asyncio.sleep(0.01)
    assert (answers["alpha"].asked, answers["beta"].asked) == (3, 1)
    await looker.close()


async def test_a_guest_with_two_copies_is_told_of_once_both_hosts_were_asked_again(
    live: tuple[Live, dict[str, Answers]],
) -> None:
    looker, answers = live
    answers["alpha"].guest = "beta"
    assert (await looker.fleet()).copies == ()
    answers["beta"].late = 0.4  # it is shown as it was
    assert (await looker.fleet()).copies == ()
    await asyncio.sleep(0.5)
    answers["beta"].late = 0.0
    (twice,) = (await looker.fleet()).copies
    assert twice.hosts == ("alpha", "beta")
    answers["alpha"].guest = "alpha"
    assert (await looker.fleet()).copies == ()
    answers["alpha"].guest = "beta"
    assert (await looker.fleet()).copies == ()
    await looker.close()


@pytest.mark.parametrize("good", [True, False])
def test_a_snapshot_is_damaged_if_its_last_verification_found_damage(good: bool) -> None:
    names = ("name", "guest", "guest_uuid", "made_at", "memory", "disks", "new", "parent", "group")
    last = Checked(depth="deep", at=1.0, good=good, what="", by="root@here", signer="")
    told = SimpleNamespace(
        id="s-1", public=SimpleNamespace(**dict.fromkeys((*names, "schedule"))), pinned=False,
        trusted=True, verdict=SimpleNamespace(last=last),
    )  # fmt: skip
    found = dashboard_source._snapshot("near", told)
    assert (found.damaged, found.good) == (not good, good)


@pytest.mark.parametrize(("one", "guests", "copies"), [(True, 1, 0), (False, 2, 1), (None, 2, 1)])
async def test_one_host_under_two_names_is_shown_as_an_error_not_as_two_copies(
    live: tuple[Live, dict[str, Answers]], monkeypatch: pytest.MonkeyPatch,
    one: bool | None, guests: int, copies: int,
) -> None:  # fmt: skip
    looker, answers = live
    answers["beta"].guest = "alpha"  # the UUID of alpha's guest
    compared = []

    async def among(hosts: list[Any]) -> tuple[SameUuid, ...]:
        compared.append([at.host.name for at in hosts])
        return (SameUuid(first="alpha", second="beta", one=one, why="x"),)

    monkeypatch.setattr(same_host, "among", among)
    await looker.fleet()
    await looker.fleet()
    seen = await looker.fleet()
    assert (len(seen.guests), len(seen.copies)) == (guests, copies)
    assert [host.error for host in seen.hosts] == [
        None, "alpha and beta are one host; leave alpha or beta out of hosts.yaml" if one else None,
    ]  # fmt: skip
    assert len(compared) == (3 if one is None else 1)
    await looker.close()
