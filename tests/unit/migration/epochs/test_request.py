"""What is asked of agents to move a guest by epochs, what is against it, and how far it is."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.support.builders import FACTS, GUEST, host_facts
from tests.support.moves import ALPHA, BETA
from tests.support.policies import policy
from tests.support.protection_facts import DISK, FINE
from vmckpt.errors import CannotCapture, RemoteError
from vmckpt.journal.recorder import JournalStepLog, Recorder
from vmckpt.migration.epochs import request
from vmckpt.migration.plan import preflight as migrate_preflight
from vmckpt.model.disk import CopyPlan, DiskCopy
from vmckpt.model.events import Caller
from vmckpt.model.finding import Finding, Severity
from vmckpt.protection import agent_client, gather, preflight
from vmckpt.protection.request import Setting
from vmckpt.protection.start import Beginning
from vmckpt.replication.session import Session
from vmckpt.units import MIB, Bytes, Seconds

POLICY = policy("version: vmckpt/v1\nname: mine\nmode: checkpoint\nlimits: {max_downtime: 400ms}\n")
SHARED = CopyPlan()
COPIES = CopyPlan(
    copies=(
        DiskCopy(
            name="vda", source="/srv/web1.qcow2", path="/pool/web1.qcow2", format="qcow2",
            size=Bytes(1 << 30), needed=Bytes(1 << 20), allocated=Bytes(1 << 20),
            full=False, options="", mode="600",
        ),
    )
)  # fmt: skip
HOSTS = cast("Any", tuple(type("H", (), {"host": host})() for host in (ALPHA, BETA)))
MINE = Finding(code="ssh", severity=Severity.WARNING, where="web1", text="some checks are left")
QEMUS = Finding(code="tcg-lost-writes", severity=Severity.WARNING, where="web1", text="TCG")


def asked(copies: CopyPlan = SHARED, **limits: Any) -> Any:
    wanted = replace(POLICY, limits=replace(POLICY.limits, **limits))
    return request.request(wanted, GUEST, "beta", copies)


def test_nobody_decides_but_the_source_and_pauses_are_as_long_as_the_downtime_allowed() -> None:
    told = asked()
    assert not told.automatic
    assert told.terms.max_pause == pytest.approx(0.4)
    assert told.move.images == {}
    assert asked(COPIES).move.images == {"vda": "/pool/web1.qcow2"}
    assert asked(COPIES).storage == "/pool"
    assert asked(bandwidth=5 * MIB).move.bandwidth == 5 * MIB


def test_a_policy_s_own_interval_is_kept() -> None:
    own = replace(POLICY, protection=replace(POLICY.protection, interval=Seconds(0.05)))
    assert request.request(own, GUEST, "beta", SHARED).terms.interval == pytest.approx(0.05)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What both hosts tell."""
    told: dict[str, Any] = {"seen": FINE, "asked": 0}

    async def order(*_: object, **__: object) -> dict[str, Any]:
        told["asked"] += 1
        if "error" in told:
            raise told["error"]
        return {}

    async def seen(*_: object) -> Any:
        return told["seen"]

    monkeypatch.setattr(agent_client, "order", order)
    monkeypatch.setattr(gather, "seen", seen)
    return told


def found(others: tuple[Finding, ...] = (), copies: CopyPlan = SHARED) -> list[Finding]:
    return list(asyncio.run(request.findings(others, POLICY, FACTS, copies, HOSTS)))


def test_of_a_guest_that_can_be_moved_so_only_what_is_about_this_mode_is_said(
    looks: dict[str, Any],
) -> None:
    assert found((MINE, QEMUS)) == [MINE]
    assert looks["asked"] == 1


def test_a_disk_that_was_not_seen_to_be_the_same_there_is_a_reason_against_it(
    looks: dict[str, Any],
) -> None:
    """libvirt, which would decide, is not asked."""
    unproven = migrate_preflight.check_move(replace(FACTS, same_file={}))
    assert [one.severity for one in unproven] == [Severity.WARNING]
    (one,) = found(unproven)
    assert (one.code, one.severity) == ("storage-unproven", Severity.BLOCKER)
    assert one.text.startswith("it is unknown whether disk ")
    assert one.text.endswith("is the same on both hosts; mode checkpoint does not check this")
    assert looks["asked"] == 0


def test_the_wording_of_a_warning_does_not_decide_what_mode_checkpoint_adds(
    looks: dict[str, Any],
) -> None:
    warning = Finding(
        code="storage-unproven", severity=Severity.WARNING, where="web1", text="vda may differ"
    )
    (one,) = found((warning,))
    assert one.severity is Severity.BLOCKER
    assert one.text == "vda may differ; mode checkpoint does not check this"
    assert looks["asked"] == 0


def test_what_is_blocked_anyway_is_not_looked_at_further(looks: dict[str, Any]) -> None:
    blocked = replace(MINE, severity=Severity.BLOCKER)
    assert found((blocked,)) == [blocked]
    assert looks["asked"] == 0


def test_a_guest_that_cannot_be_captured_is_blocked_with_a_hint(
    looks: dict[str, Any],
) -> None:
    looks["error"] = CannotCapture("web1's memory is its own")
    (one,) = found()
    assert one.severity is Severity.BLOCKER
    assert one.text == "cannot be migrated in mode checkpoint: web1's memory is its own"
    assert one.hint == "run vmckpt doctor alpha beta"
    looks["error"] = RemoteError("alpha: no agent", hint="install it")
    assert found()[0].hint == "install it"


def test_disks_that_both_hosts_see_are_no_reason_against_it(looks: dict[str, Any]) -> None:
    looks["seen"] = replace(FINE, disks=[{**DISK, "shareable": True, "format": "vmdk"}])
    assert found() == []
    assert {one.code for one in found(copies=COPIES)} == {"disk-shared"}


def test_another_qemu_there_is_one(looks: dict[str, Any]) -> None:
    looks["seen"] = replace(FINE, backup_facts=replace(host_facts("b"), qemu_version="10.0.2"))
    assert [one.code for one in found()] == ["qemu-version"]


def test_a_migration_is_not_told_what_only_a_protection_must_hear() -> None:
    seen = replace(
        FINE, automatic=False, has_lease=False, name_taken=True, devices=["disk", "serial"]
    )
    assert preflight.check_move(seen) == []
    assert {one.code for one in preflight.check_protection(seen)} >= {"by-hand", "name-taken"}


LOOKED = {
    "xml": "<domain type='kvm'><name>web1</name><devices><disk type='file'><source file='/srv/a'/>"
    "<target dev='vda'/></disk></devices></domain>",
    "definition": "<domain type='kvm'><name>web1</name><devices/></domain>", "autostart": True,
    "cards": ["net0"], "undo": "{}", "devices": {"names": ["net0"], "digest": "d"},
    "private": [["pc.bios", 1 << 18]], "epoch_cost": {"finder": "write-tracking", "why": ""},
    "disks": [
        {**DISK, "name": "vda", "source": "/srv/a"}, {**DISK, "name": "vdb", "source": "/srv/b"},
        {**DISK, "name": "vdc", "source": "pool/c", "kind": "network"},
        {**DISK, "name": "sda", "source": "/iso", "read_only": True},
    ],
}  # fmt: skip


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each side was told, once it has begun."""
    told: dict[str, Any] = {}

    async def order(host: Any, guest: str, what: str, **more: Any) -> dict[str, Any]:
        del guest
        told[f"{host.name} {what}"] = more
        return {"certificate": host.name, "owner": (7, 7), "port": 4711}

    monkeypatch.setattr(agent_client, "order", order)
    return told


def begun(
    sessions: dict[str, Any], copies: CopyPlan, **looked: Any
) -> tuple[Session, Session, str]:
    """The source's session, the target's, and the standby's description."""
    beta = replace(BETA, migration_address="10.0.0.2")
    beginning = Beginning(
        Setting(primary=ALPHA, backup=beta, lease=None), asked(copies), GUEST,
        looked={**LOOKED, **looked}, step_log=JournalStepLog(cast("Recorder", None)),
        caller=cast("Caller", None),
    )  # fmt: skip
    asyncio.run(beginning.start())
    stand = sessions["beta stand"]
    source = Session.from_json(sessions["alpha protect"]["session"])
    return source, Session.from_json(stand["session"]), str(stand["xml"])


def test_disks_that_both_hosts_see_stay_and_libvirt_leaves_their_owners_alone(
    sessions: dict[str, Any],
) -> None:
    source, target, xml = begun(sessions, SHARED)
    assert source.moves
    assert target.moves
    assert (source.disks, target.disks) == ((), ())
    assert source.extra["shared"] == ["/srv/a", "/srv/b"]
    assert '<seclabel model="dac" relabel="no" />' in xml
    assert source.lease is None
    assert not source.terms.automatic


def test_disks_that_are_copied_are_replicated_and_the_others_stay(sessions: dict[str, Any]) -> None:
    source, target, xml = begun(sessions, COPIES)
    assert [disk.path for disk in source.disks] == ["/srv/a"]
    assert [disk.path for disk in target.disks] == ["/pool/web1.qcow2"]
    assert source.extra["shared"] == ["/srv/b"]
    assert "seclabel" not in xml  # vdb is not in this description


def test_what_it_sends_is_not_held_and_its_cards_are_plugged_in_there(
    sessions: dict[str, Any],
) -> None:
    source, target, _ = begun(sessions, SHARED)
    assert source.cards == ()
    assert target.cards == ("net0",)


def test_a_transient_guest_stays_one(sessions: dict[str, Any]) -> None:
    source, target, _ = begun(sessions, SHARED, definition="", autostart=False)
    assert (source.definition, target.definition) == ("", "")
    _, stored, _ = begun(sessions, SHARED)
    assert "<name>web1</name>" in stored.definition
    assert stored.extra["autostart"]
