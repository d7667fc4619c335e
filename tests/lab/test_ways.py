"""The ways of taking a snapshot: disks alone, shared memory, libvirt's; firmware and readiness."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.lab.bench import Bench, finish, first_line, until
from tests.lab.snapshots import left, proofs, taken
from vmckpt_lab import host, ledger

SMALL: dict[str, Any] = {
    "memory": "192MiB", "dirty": "16MiB@1MiB/s", "disk": "32MiB", "disk_format": "qcow2",
}  # fmt: skip
COPIES = "/run/vmckpt/memory/snapshots"


def copies(bench: Bench) -> list[str]:
    return bench.inside("alpha", "sh", "-c", f"ls {COPIES} 2>/dev/null || true").split()


@contextmanager
def writing(bench: Bench) -> Iterator[None]:
    """Somebody else has the guest's image open for writing."""
    path = f"{bench.plan.shared}/web1.qcow2"
    inside = host.enter(bench.plan.host("alpha"), "qemu-io", "-f", "qcow2", path)
    with subprocess.Popen(
        inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write("length\n")
        program.stdin.flush()
        program.stdout.readline()
        yield
        program.stdin.close()


def test_disks_alone_also_of_a_guest_that_is_off(kept: Bench) -> None:
    kept.guest(**SMALL)
    first = taken(kept, "--no-memory").json
    assert (first["way"], first["pause_ms"]) == ("disks", 0)
    kept.inside("alpha", "virsh", "destroy", "web1")
    refused = kept.run("snapshot", "create", "web1")
    assert (refused.code, "--no-memory" in refused.err) == (2, True)
    with writing(kept):
        refused = kept.run("snapshot", "create", "web1", "--no-memory")
        assert (refused.code, "open in another process" in refused.err) == (18, True), refused.err

    off = taken(kept, "--no-memory").json
    assert (off["way_reason"], off["warnings"]) == ("the guest is off", [])
    assert off["same_bytes"] > 28 << 20  # the bitmap in its image was read, and was good
    assert left(kept) == []
    kept.inside("alpha", "virsh", "undefine", "web1", "--checkpoints-metadata")
    back = kept.good("snapshot", "restore", off["id"], "--replace", "--json").json
    assert back["runs"] is False
    assert "shut off" in kept.inside("alpha", "virsh", "domstate", "web1")
    kept.inside("alpha", "virsh", "start", "web1")
    until(lambda: kept.seen().runs == 2, limit=60)
    assert proofs(kept) == []


@pytest.mark.long
def test_a_fork_of_disks_alone_is_defined_and_off(kept: Bench) -> None:
    kept.guest(**SMALL)
    one = taken(kept, "--no-memory").json
    kept.good("snapshot", "restore", one["id"], "--as", "fork", "--on", "beta")
    try:
        assert "shut off" in kept.inside("beta", "virsh", "domstate", "fork")
        assert "<link state='down'/>" in kept.inside("beta", "virsh", "dumpxml", "fork")
        kept.inside("beta", "virsh", "start", "fork")
    finally:
        kept.inside("beta", "sh", "-c", "virsh destroy fork; virsh undefine fork")
    assert kept.ledgers() == {"memory": True, "disk": True, "output": True}


def test_shared_memory_is_compared_with_its_last_copy(kept: Bench) -> None:
    kept.guest(**SMALL, shared_memory=True)
    taken(kept, "--way", "shared")
    again = taken(kept, "--way", "shared").json
    assert (again["way"], again["way_reason"]) == ("shared", "requested")
    assert again["warnings"] == []  # and the disk was read by its bitmap
    assert again["read_bytes"] < 48 << 20
    assert again["same_bytes"] > 40 << 20
    assert {"stop", "device state", "compare", "barrier", "cont"} <= set(again["phases_ms"])

    taken(kept, "--no-memory")
    late = taken(kept, "--way", "shared").json
    assert late["read_bytes"] < 48 << 20  # a snapshot of disks alone has forgotten nothing
    kept.good("snapshot", "restore", late["id"], "--replace")
    assert proofs(kept) == []
    until(lambda: copies(kept) == [])  # that QEMU is gone


@pytest.mark.long
def test_a_last_copy_goes_when_nobody_wants_it(kept: Bench) -> None:
    kept.guest(**SMALL, shared_memory=True)
    taken(kept, "--way", "shared")
    assert copies(kept) != []
    taken(kept, "--way", "background")
    assert [name for name in copies(kept) if "." not in name] == []
    taken(kept, "--way", "shared")
    assert taken(kept).json["way"] == "tracking"
    assert [name for name in copies(kept) if "." not in name] == []
    kept.inside("alpha", "mount", "-o", "remount,size=200M", "/dev/shm")
    refused = kept.run("snapshot", "create", "web1", "--way", "shared")
    kept.inside("alpha", "mount", "-o", "remount,size=50%", "/dev/shm")
    assert (refused.code, "its host has only" in refused.err) == (51, True), refused.err
    taken(kept, "--way", "shared")
    kept.good("migrate", "web1", "--to", "beta")
    until(lambda: copies(kept) == [])
    assert kept.ledgers() == {"memory": True, "disk": True, "output": True}


@pytest.mark.long
@pytest.mark.parametrize("word", ["capture", pytest.param("store", marks=pytest.mark.campaign)])
def test_a_killed_controller_leaves_a_copy_that_can_be_used(kept: Bench, word: str) -> None:
    kept.guest(**{**SMALL, "memory": "512MiB", "dirty": "300MiB@20MiB/s"}, shared_memory=True)
    taken(kept, "--way", "shared")
    taking = kept.start("snapshot", "create", "web1", "--way", "shared")
    if word == "store":
        first_line(taking, word)
    else:
        time.sleep(1.5)
    taking.kill()
    finish(taking)
    kept.good("recover")
    after = taken(kept, "--way", "shared").json
    kept.good("snapshot", "restore", after["id"], "--replace")
    assert proofs(kept) == []


@pytest.mark.long
def test_memory_in_a_file_on_a_disk_is_tracked_or_captured_by_libvirt(kept: Bench) -> None:
    folder = "/var/tmp/ram"
    kept.inside("alpha", "sh", "-c", f"mkdir -p {folder}; mount --bind {folder} /dev/shm/ram")
    try:
        if "tmpfs" in kept.inside("alpha", "stat", "-f", "-c", "%T", "/dev/shm/ram"):
            pytest.fail("this machine's disk is a tmpfs: nothing is tried here")
        kept.guest(**SMALL, shared_memory=True)
        assert taken(kept).json["way"] == "tracking"
        tracked = taken(kept).json
        assert (tracked["way"], tracked["warnings"]) == ("tracking", [])
        for way in ("shared", "background"):
            assert kept.run("snapshot", "create", "web1", "--way", way).code != 0
        saved = taken(kept, "--way", "libvirt").json
        assert kept.ledgers() == {"memory": True, "disk": True, "output": True}
        for one in (tracked, saved):
            kept.good("snapshot", "restore", one["id"], "--replace")
            assert proofs(kept) == []
        kept.inside("alpha", "virsh", "destroy", "web1")
    finally:
        kept.inside("alpha", "sh", "-c", f"umount -l /dev/shm/ram; rm -rf {folder}")


@pytest.mark.long
def test_a_guest_is_prepared_by_a_command(kept: Bench) -> None:
    kept.guest(**SMALL)
    before = kept.inside("alpha", "virsh", "dumpxml", "--inactive", "web1")
    told = kept.good("prepare", "web1", "--dry-run", "--json").json
    assert (told["ready"], told["lacks"], told["changed"], told["restart"]) == (
        False, True, False, True,
    )  # fmt: skip
    refused = kept.run("prepare", "web1")
    assert (refused.code, "--yes" in refused.err) == (2, True)
    assert kept.inside("alpha", "virsh", "dumpxml", "--inactive", "web1") == before
    told = kept.good("prepare", "web1", "--yes", "--json").json
    assert (told["changed"], told["restart"], told["job"] is None) == (True, True, False)
    kept.inside("alpha", "virsh", "destroy", "web1")
    kept.inside("alpha", "virsh", "start", "web1")
    told = kept.good("prepare", "web1", "--json").json
    assert told["ready"] is True
    (memory,) = (one["text"] for one in told["findings"] if one["code"] == "memory")
    private = "may stay private" in memory  # this machine's kernel finds written pages
    xml = kept.inside("alpha", "virsh", "dumpxml", "web1")
    assert "<genid>" in xml
    assert ("<memoryBacking>" in xml) is not private
    until(lambda: kept.seen().runs == 2, limit=60)
    way = "tracking" if private else "shared"
    assert taken(kept, "--way", way).json["way"] == way
    assert ledger.audit(kept.plan, "web1").entries
