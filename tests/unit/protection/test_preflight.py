"""Every reason against a protection, by its name."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.builders import host_facts
from tests.support.protection_facts import DISK, FINE, room
from vmckpt.model.epoch_cost import EpochCost, Finder
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.guest import Refusal
from vmckpt.protection.preflight import ProtectionFacts, check_protection
from vmckpt.units import MIB, Bytes, Seconds


def disk(**changes: Any) -> ProtectionFacts:
    return replace(FINE, disks=[{**DISK, **changes}])


def with_device(kind: str) -> ProtectionFacts:
    return replace(FINE, devices=[*FINE.devices, kind])


def free(where: str, amount: int) -> ProtectionFacts:
    facts = replace(host_facts("x"), memory_free=Bytes(amount))
    return replace(FINE, primary_facts=facts) if where == "alpha" else (
        replace(FINE, backup_facts=facts)
    )  # fmt: skip


def shared(ours: int, theirs: int) -> ProtectionFacts:
    return replace(FINE, shared_room=(Bytes(ours), Bytes(theirs)))


def compared(seen: ProtectionFacts) -> ProtectionFacts:
    return replace(seen, epoch_cost=EpochCost(finder=Finder.COMPARE, why="the kernel is old"))


def tracked(scan: float | None, written: int) -> ProtectionFacts:
    cost = EpochCost(
        finder=Finder.WRITE_TRACKING, scan=None if scan is None else Seconds(scan),
        written=Bytes(written),
    )  # fmt: skip
    return replace(FINE, epoch_cost=cost)


VIRGL = Refusal(code="video-3d", what="has 3D", hint="turn it off")
OTHER = replace(host_facts("b"), qemu_version="10.0.2")
NEXT = replace(host_facts("b"), qemu_version="7.3.22")
BLOCKERS: list[tuple[str, str, ProtectionFacts, str]] = [
    ("same-host", "web1", replace(FINE, backup="alpha"), "protects nothing"),
    ("name-taken", "beta", replace(FINE, name_taken=True), "name or UUID of web1"),
    (
        "standby-there", "beta", replace(FINE, name_taken=True, standby_there=True),
        "beta already has a standby of web1",
    ),
    ("file-missing", "beta", replace(FINE, missing=("/srv/vmlinuz",)), "/srv/vmlinuz is missing"),
    ("qemu-version", "beta", replace(FINE, backup_facts=OTHER), "QEMU 7.2.22, but beta has 10.0.2"),
    ("qemu-version", "beta", replace(FINE, backup_facts=NEXT), "QEMU 7.2.22, but beta has 7.3.22"),
    ("memory-short", "alpha", free("alpha", 511 * MIB), "epochs in flight need 512 MiB"),
    ("memory-short", "alpha", compared(free("alpha", 767 * MIB)), "alpha has 767"),
    ("memory-short", "beta", free("beta", 767 * MIB), "beta has 767"),
    ("tmpfs-short", "alpha", shared(511 * MIB, 768 * MIB), "/dev/shm on alpha has 511"),
    ("tmpfs-short", "alpha", compared(shared(767 * MIB, 768 * MIB)), "/dev/shm on alpha has 767"),
    ("tmpfs-short", "beta", compared(shared(768 * MIB, 767 * MIB)), "/dev/shm on beta has 767"),
    ("tmpfs-short", "beta", shared(512 * MIB, 511 * MIB), "epochs in flight need 512 MiB"),
    ("pause-long", "web1", compared(replace(FINE, memory=[2 << 30, 2 << 30])),
     "would pause the guest for about 1.0 s, but only 500 ms is allowed: 4.0 GiB of memory"),
    ("pause-long", "web1", tracked(0.4, 2 << 30), "a scan of 256 MiB takes 400 ms"),
    ("disk-lun", "web1", disk(device="lun"), "web1's vda passes SCSI commands through"),
    ("video-3d", "web1", replace(FINE, unsaved=VIRGL), "has 3D: QEMU cannot save its state"),
    ("disk-shared", "web1", disk(shareable=True), "web1's vda is shareable"),
    ("disk-unknown", "web1", disk(node=None), "size or node of web1's vda"),
    ("disk-unknown", "web1", disk(size=None), "size or node of web1's vda"),
    ("disk-kind", "web1", disk(kind="network"), "web1's vda has type network"),
    ("disk-format", "web1", disk(format="vmdk"), "web1's vda is vmdk"),
    ("room-short", "beta", replace(FINE, rooms=(room((1 << 30) - 1),)), "in /srv; the guest's"),
    (
        "room-short", "beta",
        replace(FINE, rooms=(room(1 << 30), replace(room(0), device="2", folder="/data"))),
        "0 B of free space for images in /data",
    ),
    ("nbdkit-missing", "alpha", replace(FINE, disk_logs=False), "alpha lacks nbdkit"),
    ("no-lease", "web1", replace(FINE, has_lease=False), "vmckpt cannot know"),
    *((f"device-{kind}", "web1", with_device(kind), f"its {kind} device")
      for kind in ("hostdev", "filesystem", "vsock", "shmem", "redirdev")),
    ("device-tpm", "web1", with_device("tpm"), "its TPM has state that cannot be replicated"),
]  # fmt: skip
WARNINGS = [
    ("disk-read-only", disk(read_only=True, kind="block", source="/dev/sr0"), "/dev/sr0"),
    ("output-not-held", with_device("serial"), "serial"),
    ("output-not-held", with_device("graphics"), "graphics"),
    ("output-not-held", with_device("channel"), "channel"),
    ("by-hand", replace(FINE, automatic=False), "failover is manual: run vmckpt"),
    ("by-hand", replace(FINE, has_lease=False, automatic=False), "vmckpt failover"),
    (
        "watched",
        replace(FINE, has_lease=False, fence="fence_ipmilan"),
        "only vmckpt run fails over automatically, after fence_ipmilan has powered alpha off",
    ),
]


def blockers(found: list[Finding]) -> list[Finding]:
    return [one for one in found if one.severity is Severity.BLOCKER]


def test_nothing_is_said_of_a_guest_that_can_be_protected() -> None:
    assert check_protection(FINE) == []


@pytest.mark.parametrize("severity", list(Severity))
def test_a_lease_store_that_may_forget_is_warned_of(severity: Severity) -> None:
    told = Finding(code="lease-replicas", severity=severity, where="lease store", text="x")
    found = check_protection(replace(FINE, lease_store=told))
    assert found == ([told] if severity is Severity.WARNING else [])


@pytest.mark.parametrize(
    ("code", "where", "seen", "text"), BLOCKERS,
    ids=[f"{number}-{one[0]}" for number, one in enumerate(BLOCKERS)],
)  # fmt: skip
def test_each_reason_against_it_is_a_blocker(
    code: str, where: str, seen: ProtectionFacts, text: str
) -> None:
    (found,) = blockers(check_protection(seen))

    assert (found.code, found.where) == (code, where)
    assert text in found.text


@pytest.mark.parametrize(("code", "seen", "text"), WARNINGS)
def test_what_only_must_be_known_is_a_warning(code: str, seen: ProtectionFacts, text: str) -> None:
    (found,) = check_protection(seen)

    assert (found.code, found.severity) == (code, Severity.WARNING)
    assert text in found.text


@pytest.mark.parametrize("seen", [one[2] for one in BLOCKERS])
def test_a_blocker_says_in_one_line_what_to_do(seen: ProtectionFacts) -> None:
    for found in blockers(check_protection(seen)):
        assert found.hint
        assert "\n" not in found.text + found.hint
        assert len(f"{found.where}: {found.text}; {found.hint}") < 220


def test_blockers_come_first_and_all_are_told() -> None:
    seen = replace(
        FINE, has_lease=False, name_taken=True, devices=["serial", "tpm"],
        disks=[
            {**DISK, "read_only": True, "kind": "block"},
            {**DISK, "name": "vdb", "format": "luks"},
        ],
    )  # fmt: skip
    found = check_protection(seen)
    count = len(blockers(found))

    assert {one.code for one in found[:count]} == {
        "no-lease", "name-taken", "device-tpm", "disk-format"
    }  # fmt: skip
    assert [one.code for one in found[count:]] == ["disk-read-only", "output-not-held"]


@pytest.mark.parametrize(
    "seen",
    [
        replace(FINE, backup_facts=replace(host_facts("b"), qemu_version="7.2.7")),
        compared(replace(FINE, memory=[31 << 26])),
        tracked(0.1, 10 * MIB),
        tracked(None, 0),
        free("alpha", 512 * MIB),
        compared(free("alpha", 768 * MIB)),
        free("beta", 768 * MIB),
        replace(FINE, rooms=(room(1 << 30),)),
        disk(source=None, node=None, format=None, read_only=True),
        disk(format="raw"),
        disk(kind="block"),
        shared(512 * MIB, 512 * MIB),
    ],
    ids=["another patch of QEMU", "just short enough", "a short scan", "a cost that is not known",
         "just room here", "just room here for a copy", "just room there",
         "just room on disk", "an empty drive", "raw", "a block device", "just room on tmpfs"],
)  # fmt: skip
def test_what_is_just_enough_is_nothing_to_tell(seen: ProtectionFacts) -> None:
    assert check_protection(seen) == []
