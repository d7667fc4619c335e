from dataclasses import replace
from typing import Any

import pytest

from tests.support import foreign
from tests.support.builders import FACTS, GUEST, host_facts
from vmckpt.definition.host_resources import Kind
from vmckpt.definition.needs import Answer, Resource
from vmckpt.hypervisor import domain_xml
from vmckpt.migration.plan import preflight
from vmckpt.migration.plan.facts import Facts
from vmckpt.model.disk import Checkpoint
from vmckpt.model.finding import Severity
from vmckpt.model.guest import GuestState, Nic, Refusal
from vmckpt.model.host import GuestOnHost
from vmckpt.units import Bytes

DISK = GUEST.disks[0]
KERNEL = Resource(kind=Kind.FILE, name="/boot/k")
PAGES = Resource(kind=Kind.HUGE_PAGES, name="")
TRANSIENT = Refusal(
    code="disk-transient", what="has a transient disk: vda", hint="x", by_qemu=False
)
VIRGL = Refusal(code="video-3d", what="has 3D", hint="x")
CHECKPOINT = Checkpoint(name="virtnbdbackup.0", parent=None, made_at=0)


def guest(**changes: Any) -> Facts:
    return replace(FACTS, guest=replace(GUEST, **changes))


def target(**changes: Any) -> Facts:
    return replace(FACTS, target_facts=replace(host_facts("b"), **changes))


def on_target(name: str, uuid: str, state: GuestState) -> Facts:
    return target(guests=(GuestOnHost(name=name, uuid=uuid, state=state),))


def test_nothing_is_said_of_a_guest_that_can_move() -> None:
    assert preflight.check_move(FACTS) == ()


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
    ("file-missing", replace(FACTS, needs=(KERNEL,), answers={KERNEL: Answer.ABSENT})),
    ("definition-refused", replace(FACTS, refused="unsupported configuration: x")),
    ("qemu-blocks", replace(FACTS, blocked=("virtio-9p is mounted",))),
    ("disk-transient", guest(refusals=(TRANSIENT,))),
    ("network-missing", replace(FACTS, target_links=frozenset({"lo"}))),
    ("network-missing", guest(nics=(Nic(kind="network", source="lan"),))),
    ("uuid-taken", on_target("other", GUEST.uuid, GuestState.SHUT_OFF)),
    ("uuid-taken", on_target("web1", GUEST.uuid, GuestState.RUNNING)),
    ("name-taken", on_target("web1", "another", GuestState.SHUT_OFF)),
    ("accelerator", target(accelerators=frozenset({"qemu"}))),
    ("architecture", target(platforms={("aarch64", "kvm"): frozenset({"pc-q35-7.2"})})),
    ("accelerator", target(platforms={("x86_64", "qemu"): frozenset({"pc-q35-7.2"})})),
    ("machine-type", target(platforms={("x86_64", "kvm"): frozenset({"pc-q35-5.2"})})),
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


@pytest.mark.parametrize(
    ("state", "hint"),
    [
        (GuestState.SHUT_OFF, "run virsh start web1 on alpha"),
        (GuestState.PAUSED, "run virsh resume web1 on alpha"),
        (GuestState.SUSPENDED, "run virsh dompmwakeup web1 on alpha"),
        (GuestState.SHUTTING_DOWN, "when it is off, run virsh start web1 on alpha"),
        (
            GuestState.CRASHED,
            "to restart it, run virsh reset web1 and virsh resume web1 on alpha",
        ),
    ],
)
def test_a_guest_runs_again_by_the_command_for_its_state(state: GuestState, hint: str) -> None:
    (found,) = preflight.check_move(guest(state=state))
    assert found.hint == hint


def test_only_a_guest_that_is_off_is_renamed_and_an_active_one_ended_before_it_is_undefined() -> (
    None
):
    for active, state in ((False, GuestState.SHUT_OFF), (True, GuestState.RUNNING)):
        (named,) = preflight.check_move(on_target("web1", "another", state))
        assert "virsh domrename web1 NEW on beta" in str(named.hint)
        assert ("virsh shutdown web1" in str(named.hint)) == active
        (found,) = preflight.check_move(on_target("other", GUEST.uuid, state))
        assert "virsh undefine other" in str(found.hint)
        assert ("virsh destroy other" in str(found.hint)) == active


WARNINGS = [
    ("foreign-checkpoints", replace(FACTS, checkpoints=(CHECKPOINT,))),
    ("huge-pages", replace(target(memory_free=Bytes(0)), guest=replace(GUEST, huge_pages=True))),
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


def test_a_guest_that_stands_still_for_its_job_is_not_to_be_resumed() -> None:
    found = preflight.check_move(guest(state=GuestState.PAUSED, job="outgoing migration"))
    assert [f.code for f in found] == ["job-in-progress"]


def test_what_qemu_refuses_is_said_once() -> None:
    refused = replace(guest(refusals=(VIRGL,)), blocked=("virgl is not yet migratable",))
    more = replace(refused, blocked=("virgl is not yet migratable", "virtio-9p is mounted"))

    assert [one.code for one in preflight.check_move(refused)] == ["video-3d"]
    assert [one.code for one in preflight.check_move(more)] == ["video-3d", "qemu-blocks"]


def test_libvirts_first_reason_is_left_out_where_a_finding_explains_it() -> None:
    facts = replace(
        FACTS, needs=(KERNEL,), answers={KERNEL: Answer.ABSENT}, refused="cannot open /boot/k"
    )

    assert [one.code for one in preflight.check_move(facts)] == ["file-missing"]


def test_huge_pages_that_were_counted_need_no_warning() -> None:
    facts = replace(guest(huge_pages=True), needs=(PAGES,))
    short = replace(facts, answers={PAGES: Answer.ABSENT})

    assert preflight.check_move(replace(facts, answers={PAGES: Answer.PRESENT})) == ()
    assert [one.code for one in preflight.check_move(short)] == ["huge-pages-short"]


def test_a_host_of_another_architecture_runs_no_kvm_guest_of_this_one() -> None:
    platforms = domain_xml.platforms(foreign.text("capabilities-aarch64-host-with-x86-tcg"))
    facts = target(platforms=platforms)
    emulated = replace(GUEST, accelerator="qemu", kernel_arguments="pti=on")
    (found,) = preflight.check_move(facts)

    assert found.code == "accelerator"
    assert preflight.check_move(replace(facts, guest=emulated)) == ()
