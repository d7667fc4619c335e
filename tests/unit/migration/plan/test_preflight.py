from dataclasses import replace
from typing import Any

import pytest

from tests.support.builders import FACTS, GUEST, host_facts
from vmckpt.migration.plan import preflight
from vmckpt.migration.plan.preflight import Facts
from vmckpt.model.finding import Severity
from vmckpt.model.guest import GuestState, Nic
from vmckpt.model.host import GuestOnHost
from vmckpt.units import Bytes

DISK = GUEST.disks[0]


def guest(**changes: Any) -> Facts:
    return replace(FACTS, guest=replace(GUEST, **changes))


def target(**changes: Any) -> Facts:
    return replace(FACTS, target_facts=replace(host_facts("b"), **changes))


def on_target(name: str, uuid: str, state: GuestState) -> Facts:
    return target(guests=(GuestOnHost(name=name, uuid=uuid, state=state),))


def test_nothing_is_said_of_a_guest_that_can_move() -> None:
    assert preflight.check_move(FACTS) == ()
    assert preflight.storage_proven(FACTS)


@pytest.mark.parametrize(
    "facts",
    [
        replace(FACTS, target="alpha"),
        replace(FACTS, target_facts=None, target_error="beta: no answer"),
    ],
)
def test_of_a_move_that_cannot_be_there_are_no_doubts_beside_that(facts: Facts) -> None:
    doubts = replace(facts, same_file={}, target_links=None, ssh_errors=("beta: no login",))
    (only,) = preflight.check_move(doubts)
    assert only.code in ("same-host", "host-down")
    held = replace(doubts, guest=replace(GUEST, job="backup"))
    assert {one.code for one in preflight.check_move(held)} == {only.code, "job-in-progress"}


CASES = [
    ("host-down", replace(FACTS, target_facts=None, target_error="beta: no answer")),
    ("host-down", replace(FACTS, guest=None, source_facts=None, source_error="alpha: no answer")),
    ("guest-unknown", replace(FACTS, guest=None)),
    ("same-host", replace(FACTS, target="alpha")),
    ("same-libvirt", target(uuid="a")),
    ("guest-not-running", guest(state=GuestState.SHUT_OFF)),
    ("guest-not-running", guest(state=GuestState.PAUSED)),
    ("job-in-progress", guest(job="backup")),
    ("has-snapshots", guest(snapshots=2)),
    ("host-device", guest(host_devices=("pci 0000:03:00.0",))),
    ("cache-mode", guest(disks=(replace(DISK, cache="unsafe"),))),
    ("storage-not-visible", replace(FACTS, same_file={"/srv/web1.raw": False})),
    ("storage-not-visible", replace(
        FACTS, guest=replace(GUEST, disks=(replace(DISK, read_only=True),)),
        on_target={"/srv/web1.raw": False})),
    ("storage-not-visible", replace(
        FACTS, guest=replace(GUEST, disks=(replace(DISK, below=("/base.raw",)),)),
        on_target={"/base.raw": False, "/srv/web1.raw": True})),
    ("storage-not-visible", guest(disks=(replace(DISK, kind="nvme", source=None),))),
    ("file-missing", replace(
        FACTS, guest=replace(GUEST, boot_files=("/boot/k",)), on_target={"/boot/k": False})),
    ("network-missing", replace(FACTS, target_links=frozenset({"lo"}))),
    ("network-missing", guest(nics=(Nic(kind="network", source="lan"),))),
    ("uuid-taken", on_target("other", GUEST.uuid, GuestState.SHUT_OFF)),
    ("uuid-taken", on_target("web1", GUEST.uuid, GuestState.RUNNING)),
    ("name-taken", on_target("web1", "another", GuestState.SHUT_OFF)),
    ("accelerator", target(accelerators=frozenset({"qemu"}))),
    ("machine-type", target(machines=frozenset({"pc-q35-5.2"}))),
    ("cpu-model", replace(FACTS, cpu_fits=False)),
    ("memory-room", target(memory_free=Bytes(300 << 20))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "facts"), CASES, ids=[f"{i}-{c}" for i, (c, _) in enumerate(CASES)]
)
def test_each_reason_against_a_move_is_a_blocker_that_says_what_to_do(
    code: str, facts: Facts
) -> None:
    found = preflight.blockers(preflight.check_move(facts))

    assert [code] == [finding.code for finding in found]
    assert found[0].hint


def test_a_standby_is_not_taken_for_another_copy_of_the_guest() -> None:
    (found,) = preflight.check_move(on_target("web1", GUEST.uuid, GuestState.PAUSED))

    assert found.hint is not None
    assert found.hint.startswith(
        "run vmckpt status web1 to see whether that guest is its standby; if not, "
    )


TCG = replace(GUEST, accelerator="qemu")


def test_a_tcg_guest_that_flushes_its_tlb_or_a_newer_qemu_loses_no_writes() -> None:
    flushing = replace(TCG, kernel_arguments="quiet pti=on")
    newer = replace(host_facts("a"), qemu_version="10.0.2")

    assert preflight.check_move(replace(FACTS, guest=flushing)) == ()
    assert preflight.check_move(replace(FACTS, guest=TCG, source_facts=newer)) == ()


WARNINGS = [
    ("huge-pages", replace(target(memory_free=Bytes(0)), guest=replace(GUEST, huge_pages=True))),
    ("tcg-lost-writes", replace(FACTS, guest=TCG)),
    ("cpu-passthrough", guest(cpu_mode="host-passthrough")),
    ("storage-unproven", replace(FACTS, same_file={}, on_target={})),
    ("network-unproven", replace(FACTS, target_links=None)),
    ("definition-replaced", on_target("web1", GUEST.uuid, GuestState.SHUT_OFF)),
    ("client-driven", replace(FACTS, peer_login_error="no route")),
    ("ssh", replace(FACTS, ssh_errors=("alpha: no login",))),
]


@pytest.mark.parametrize(("code", "facts"), WARNINGS, ids=[code for code, _ in WARNINGS])
def test_what_may_go_wrong_is_a_warning(code: str, facts: Facts) -> None:
    found = preflight.check_move(facts)

    assert [(code, Severity.WARNING)] == [(finding.code, finding.severity) for finding in found]


def test_all_blockers_come_at_once_and_before_warnings() -> None:
    facts = replace(
        guest(job="backup", snapshots=1, cpu_mode="host-passthrough", state=GuestState.PAUSED),
        cpu_fits=False, same_file={"/srv/web1.raw": False}, target_links=frozenset(),
    )  # fmt: skip
    found = preflight.check_move(facts)

    assert [f.code for f in found] == [
        "guest-not-running", "job-in-progress", "has-snapshots", "storage-not-visible",
        "network-missing", "cpu-model", "cpu-passthrough",
    ]  # fmt: skip


def test_the_arriving_end_of_a_running_migration_is_no_second_blocker() -> None:
    facts = replace(
        on_target("web1", GUEST.uuid, GuestState.PAUSED),
        guest=replace(GUEST, job="outgoing migration"),
    )

    assert [f.code for f in preflight.check_move(facts)] == ["job-in-progress"]


def test_an_empty_drive_is_no_obstacle() -> None:
    empty = replace(DISK, target="sda", source=None)

    assert preflight.check_move(guest(disks=(DISK, empty))) == ()


def test_storage_that_was_not_looked_at_is_not_proven() -> None:
    assert not preflight.storage_proven(replace(FACTS, same_file={}))


@pytest.mark.parametrize("kind", ["volume", "block", "dir"])
def test_one_disk_that_cannot_be_proven_leaves_all_to_libvirt(kind: str) -> None:
    facts = guest(disks=(DISK, replace(DISK, target="vdb", kind=kind, source="pool/x")))

    assert not preflight.storage_proven(facts)
    assert [f.code for f in preflight.check_move(facts)] == ["storage-unproven"]


def test_network_disks_are_shared_by_nature_and_media_need_only_be_there() -> None:
    remote = replace(DISK, target="vdb", kind="network", source="pool/x")
    medium = replace(DISK, target="sda", source="/iso/a.iso", read_only=True)
    facts = replace(guest(disks=(DISK, remote, medium)), on_target={"/iso/a.iso": True})

    assert preflight.storage_proven(facts)
    assert preflight.check_move(facts) == ()


def test_a_guest_that_stands_still_for_its_job_is_not_to_be_resumed() -> None:
    found = preflight.check_move(guest(state=GuestState.PAUSED, job="outgoing migration"))
    assert [f.code for f in found] == ["job-in-progress"]


def test_an_image_that_a_disk_lies_on_must_be_the_same_or_hold_the_same() -> None:
    on = replace(DISK, below=("/base.raw",))
    facts = replace(guest(disks=(on,)), on_target={"/srv/web1.raw": True, "/base.raw": True})
    same = replace(facts, same_file={"/srv/web1.raw": True, "/base.raw": True})
    assert preflight.check_move(same) == ()
    assert preflight.storage_proven(same)
    another = replace(facts, same_file={"/srv/web1.raw": True, "/base.raw": False})
    (found,) = preflight.check_move(another)
    assert (found.code, found.severity) == ("storage-backing", Severity.WARNING)
    assert not preflight.storage_proven(another)
    assert not preflight.storage_proven(replace(facts, same_file={"/srv/web1.raw": True}))
    assert not preflight.storage_proven(guest(disks=(replace(DISK, on_device=True),)))


def test_a_disk_without_a_path_is_no_empty_drive_unless_it_may_be_one() -> None:
    nvme = replace(DISK, kind="nvme", source=None)
    assert not preflight.storage_proven(guest(disks=(nvme,)))
    assert preflight.storage_proven(guest(disks=(replace(DISK, source=None),)))
