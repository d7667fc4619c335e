"""Disks of a running guest at one instant: whole, incremental, and what becomes of their line."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lab.bench import WHOLE, Bench, until, uuid
from tests.lab.moving import move, planned, prepared
from vmckpt.capture.disks.live import DiskCapture, DiskUndo, put_back, remove_left
from vmckpt.capture.disks.plan import How, Parent
from vmckpt.capture.disks.reader import UNIT, DiskReader, State
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import qmp
from vmckpt.hypervisor.backup import Backups, BitmapLost
from vmckpt.hypervisor.guest_agent import GuestAgent, thaw_left
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.model.disk import BackupOrder, CopyOptions, DiskOrder
from vmckpt.units import MIB, Bytes, Seconds

SMALL: dict[str, Any] = {
    "memory": "128MiB", "dirty": "4MiB@1MiB/s", "disk": "64MiB", "disk_format": "qcow2",
    "written": "6MiB",
}  # fmt: skip
SIZE = 64 * MIB


@contextmanager
def beside(bench: Bench, on: str = "alpha") -> Iterator[Backups]:
    with QmpMonitor(uuid(bench, on), host=on, uri=bench.inventory.host(on).uri) as monitor:
        yield Backups(monitor)


@contextmanager
def capturing(
    bench: Bench, backups: Backups, snapshot: str, parent: str | None, on: str = "alpha"
) -> Iterator[DiskCapture]:
    """A capture past its instant."""
    before = None
    if parent is not None:
        before = Parent(id=parent, made_at=int(time.time()), sizes={"vda": Bytes(SIZE)})
    with DiskCapture(
        backups, guest=uuid(bench, on), host=on, snapshot=snapshot, folder=bench.plan.shared
    ) as disks:
        undo = disks.prepare(before)
        assert DiskUndo.from_json(undo.to_json()) == undo
        if snapshot != "s-1":  # else libvirt does it
            disks.make_room()
        disks.freeze_point()
        yield disks


def content(reader: DiskReader, before: bytes | None = None) -> bytes:
    """All of a disk; units that did not change come from the snapshot before."""
    found = bytearray(reader.size)
    for run in reader.runs():
        begin, end = run.start * UNIT, min((run.start + run.count) * UNIT, reader.size)
        if run.state is State.SAME:
            assert before is not None
            found[begin:end] = before[begin:end]
        elif run.state is State.DATA:
            for first in range(run.start, run.start + run.count, 40):  # across the grid's lines
                count = min(40, run.start + run.count - first)
                at = first * UNIT
                part = reader.read(first, count)
                found[at : at + len(part)] = part[: reader.size - at]
    return bytes(found)


def whole(reader: DiskReader) -> bytes:
    """All of a disk, whatever is said of its units."""
    units = -(-reader.size // UNIT)
    return bytes(reader.read(0, units)[: reader.size])


def only(disks: DiskCapture) -> DiskReader:
    (disk,) = disks.disks
    return disks.reader(disk)


def snapshot(
    bench: Bench, backups: Backups, name: str, parent: str | None, before: bytes | None = None,
    on: str = "alpha",
) -> tuple[bytes, DiskCapture]:  # fmt: skip
    """A kept snapshot of a guest with one disk."""
    with capturing(bench, backups, name, parent, on) as disks:
        with only(disks) as reader:
            found = content(reader, before)
        disks.keep_bitmap()
    return found, disks


def written(bench: Bench) -> int:
    return bench.seen().highest


def more_written(bench: Bench, records: int = 20) -> None:
    seen = written(bench)
    until(lambda: written(bench) > seen + records)


def hows(disks: DiskCapture) -> list[How]:
    assert disks.plan is not None
    return [choice.how for choice in disks.plan.choices]


def left(bench: Bench) -> list[str]:
    return sorted(p.name for p in bench.plan.shared.iterdir() if p.name.startswith("vmckpt-"))


def bitmaps(backups: Backups) -> list[str]:
    return sorted(b.name for disk in backups.facts() for b in disk.bitmaps)


def killed(bench: Bench, on: str = "alpha") -> None:
    bench.inside(on, "sh", "-c", "kill -9 $(cat /run/libvirt/qemu/web1.pid)")
    until(lambda: bench.where() == [])


def test_incremental_is_the_same_as_whole_while_the_guest_writes(bench: Bench) -> None:
    bench.guest(**SMALL)
    with beside(bench) as backups:
        first, disks = snapshot(bench, backups, "s-1", None)
        assert hows(disks) == [How.FULL]
        assert first.count(b"\xa7") >= 6 * MIB
        for number, parent in ((2, "s-1"), (3, "s-2")):
            more_written(bench)
            with (
                capturing(bench, backups, f"s-{number}", parent) as disks,
                only(disks) as reader,
            ):
                assert reader.incremental
                more_written(bench, 5)  # after the instant: must not be seen
                second = content(reader, first)
                changed = sum(r.count for r in reader.runs() if r.state is not State.SAME)
                assert second == whole(reader)
                assert 0 < changed < 20
                assert second != first
                disks.keep_bitmap()
            first = second
        assert bitmaps(backups) == ["vmckpt-s-3"]
        assert backups.opened() is None
    assert left(bench) == []
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_a_capture_that_fails_leaves_nothing_and_the_line_goes_on(bench: Bench) -> None:
    bench.guest(**SMALL)
    with beside(bench) as backups:
        first, _ = snapshot(bench, backups, "s-1", None)
        with (
            pytest.raises(RuntimeError, match="the store is full"),
            capturing(bench, backups, "s-2", "s-1"),
        ):
            raise RuntimeError("the store is full")
        assert (backups.opened(), bitmaps(backups), left(bench)) == (None, ["vmckpt-s-1"], [])
        # As after a kill: nobody has tidied up.
        order = BackupOrder(
            id="s-3", folder=str(bench.plan.shared),
            disks=(DiskOrder(name="vda", since="vmckpt-s-1", mark=True),),
        )  # fmt: skip
        opened = backups.begin(order)
        assert backups.opened() == opened
        undo = DiskUndo(
            guest=uuid(bench), snapshot="s-3", socket=order.socket, files=(order.socket,)
        )
        bench.ask(
            "alpha",
            lambda hypervisor: qmp.call_on_domain(
                hypervisor, undo.guest, "putting back",
                lambda there: put_back(Backups(there), undo, published=False), changes=True,
            ),
        )  # fmt: skip
        remove_left(undo.files)
        assert (backups.opened(), bitmaps(backups), left(bench)) == (None, ["vmckpt-s-1"], [])
        assert not backups.end(order.socket)
        more_written(bench)
        with capturing(bench, backups, "s-4", "s-1") as disks:
            assert hows(disks) == [How.INCREMENTAL]
            with only(disks) as reader:
                assert content(reader, first) == whole(reader)
        unknown = DiskOrder(name="vda", since="vmckpt-s-9", mark=True)
        with pytest.raises(BitmapLost) as lost:
            backups.begin(replace(order, id="s-5", disks=(unknown,)))
        assert lost.value.disk == "vda"
        assert left(bench) == []
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_a_bitmap_lost_by_a_crash_costs_a_whole_read_in_the_same_line(bench: Bench) -> None:
    bench.guest(**SMALL)
    with beside(bench) as backups:
        snapshot(bench, backups, "s-1", None)
        bench.inside("alpha", "virsh", "-q", "destroy", "--graceful", "web1")
        bench.inside("alpha", "virsh", "-q", "start", "web1")
        assert bitmaps(backups) == ["vmckpt-s-1"]
        with capturing(bench, backups, "s-2", "s-1") as disks:
            assert hows(disks) == [How.INCREMENTAL]
            killed(bench)  # with the backup open
            with pytest.raises(HypervisorError, match="disk vda over NBD"):
                only(disks)
        assert left(bench) == []
        bench.inside("alpha", "virsh", "-q", "start", "web1")
        broken = backups.facts()[0].bitmap("vmckpt-s-1")
        assert broken is not None
        assert broken.inconsistent
        found, disks = snapshot(bench, backups, "s-3", "s-1")
        assert hows(disks) == [How.FULL]
        assert disks.plan is not None
        (finding,) = disks.plan.findings("web1")
        assert (finding.code, finding.severity) == ("disk-bitmap-lost", "warning")
        assert bitmaps(backups) == ["vmckpt-s-3"]
        _, disks = snapshot(bench, backups, "s-4", "s-3", found)
        assert hows(disks) == [How.INCREMENTAL]


@pytest.mark.parametrize(
    "private", [False, pytest.param(True, marks=pytest.mark.long)], ids=["shared", "copied"]
)
def test_a_line_survives_a_migration(bench: Bench, private: bool) -> None:
    bench.guest(**SMALL, private_disk=private)
    with beside(bench) as backups:
        first, _ = snapshot(bench, backups, "s-1", None)
    more_written(bench)
    if private:
        plan = planned(bench, CopyOptions())
        prepared(bench, plan)
        moved = move(bench, copied_disks=plan.disks, storage_proven=False)
    else:
        moved = move(bench)
    assert moved.explained == ""
    with beside(bench, "beta") as backups:
        assert backups.checkpoints() == ()
        assert bitmaps(backups) == ["vmckpt-s-1"]
        with capturing(bench, backups, "s-2", "s-1", on="beta") as disks:
            assert hows(disks) == [How.INCREMENTAL]
            assert [one.name for one in backups.checkpoints()] == ["vmckpt-s-1", "vmckpt-s-2"]
            with only(disks) as reader:
                assert content(reader, first) == whole(reader)
            disks.keep_bitmap()
        assert bitmaps(backups) == ["vmckpt-s-2"]
        line = backups.checkpoints()
        assert backups.redefine(line) == ()  # may be repeated
        strange = [replace(line[0], name="vmckpt-s-9", parent="x", disks={"vda": "vmckpt-s-9"})]
        assert backups.redefine(strange) == ("vmckpt-s-9",)
        assert backups.redefine(strange, validate=False) == ()
        assert backups.sweep(["vmckpt-s-2"]) == ("vmckpt-s-9",)
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_a_guest_with_raw_and_other_disks_and_without_an_agent(bench: Bench) -> None:
    guest = bench.guest(**(SMALL | {"disk_format": "raw"}))
    seed = bench.plan.shared / "seed.iso"
    seed.write_bytes(bytes(MIB))
    odd = bench.plan.shared / "odd.qcow2"
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", "-o", "compat=0.10", odd, "1M"], check=True
    )
    attach = ["virsh", "-q", "attach-disk", "web1", "--driver", "qemu", "--targetbus", "virtio"]
    try:
        bench.inside("alpha", *attach, str(seed), "vdb", "--subdriver", "raw", "--mode", "readonly")
        bench.inside("alpha", *attach, str(odd), "vdc", "--subdriver", "qcow2")
        with QmpMonitor(
            uuid(bench), host="alpha", uri=bench.inventory.host("alpha").uri
        ) as monitor:
            agent = GuestAgent(monitor)
            assert not agent.there()
            assert not thaw_left(agent)
            with pytest.raises(HypervisorError, match="guest agent is not configured"):
                agent.freeze(limit=Seconds(1.0))
        bench.inside("alpha", "virsh", "-q", "suspend", "web1")
        with beside(bench) as backups:
            with capturing(bench, backups, "s-1", None) as disks:
                assert disks.plan is not None
                assert [(c.name, c.how, c.mark) for c in disks.plan.choices] == [
                    ("vda", How.FULL, False), ("vdb", How.LEFT_OUT, False),
                    ("vdc", How.FULL, False),
                ]  # fmt: skip
                found = {}
                for disk in disks.disks:
                    with disks.reader(disk) as reader:
                        found[reader.name] = content(reader)
                disks.keep_bitmap()
            assert backups.checkpoints() == ()
        assert found["vdc"] == bytes(MIB)
        assert found["vda"] == Path(guest.disk_path).read_bytes()
        bench.inside("alpha", "virsh", "-q", "resume", "web1")
        assert bench.ledgers() == WHOLE
    finally:
        for path in (seed, odd):
            path.unlink()
    assert left(bench) == []
