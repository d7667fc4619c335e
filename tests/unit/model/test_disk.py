"""What copies of disks, backups and checkpoints say of themselves."""

from dataclasses import replace
from pathlib import Path

import pytest

from vmckpt.model.disk import (
    BackupOrder,
    Bitmap,
    Checkpoint,
    CopyPlan,
    DiskCopy,
    DiskFacts,
    DiskOrder,
    Made,
    is_locked,
    line_folder,
)
from vmckpt.units import GIB, MIB, Bytes

VDA = DiskCopy(
    name="vda", source="/srv/a.raw", path="/pool/a.raw", format="raw", size=Bytes(GIB),
    needed=Bytes(GIB), allocated=Bytes(MIB), full=True, options="", mode="600",
)  # fmt: skip
VDB = replace(
    VDA, name="vdb", source="/srv/b.qcow2", path="/pool/b.qcow2", format="qcow2",
    size=Bytes(2 * GIB), allocated=Bytes(3 * MIB),
)  # fmt: skip


def test_a_plan_s_copies_are_counted_together() -> None:
    plan = CopyPlan(copies=(VDA, VDB))

    assert (plan.size, plan.travels) == (3 * GIB, 4 * MIB)
    assert plan.disks == ("vda", "vdb")
    assert plan.placed == {"vda": "/pool/a.raw", "vdb": "/pool/b.qcow2"}
    assert plan.left_behind == ("/srv/a.raw", "/srv/b.qcow2")
    assert (CopyPlan().size, CopyPlan().travels) == (0, 0)


@pytest.mark.parametrize(
    ("copy", "room"),
    [(VDA, {"/pool/a.raw": GIB}), (replace(VDA, full=False), {}), (VDB, {})],
)
def test_only_raw_images_that_are_copied_whole_take_all_their_room(
    copy: DiskCopy, room: dict[str, int]
) -> None:
    assert CopyPlan(copies=(copy,)).room == room


def test_an_image_has_another_name_until_the_journal_knows_it() -> None:
    assert Made(host="beta", suffix="7a").temporary("/pool/a.raw") == "/pool/a.raw.7a"


@pytest.mark.parametrize(
    ("bitmap", "whole"),
    [
        (Bitmap(name="b"), True),
        (Bitmap(name="b", recording=False), False),
        (Bitmap(name="b", busy=True), False),
        (Bitmap(name="b", inconsistent=True), False),
    ],
)
def test_a_bitmap_counts_only_if_it_has_seen_all_writes(bitmap: Bitmap, whole: bool) -> None:
    disk = DiskFacts(
        name="vda", kind="file", device="disk", format="qcow2", source="/a", bitmaps=(bitmap,)
    )

    assert bitmap.whole is whole
    assert disk.bitmap("b") is bitmap
    assert disk.bitmap("c") is None


def test_a_backup_s_names_are_told_from_other_programs_names() -> None:
    order = BackupOrder(id="s1", folder="/run/x", disks=(DiskOrder(name="vda"),))

    assert Checkpoint(name=order.checkpoint, parent=None, made_at=0).ours
    assert not Checkpoint(name="s1", parent=None, made_at=0).ours
    assert order.socket == f"/run/x/{order.checkpoint}.nbd"
    names = {order.socket, order.scratch("vda"), order.scratch("vdb")}
    assert len(names) == 3


def test_each_line_of_a_guest_has_a_folder_of_its_own() -> None:
    assert line_folder("/state", "u-1", "near") == Path("/state/lines/u-1-near")
    assert line_folder("/state", "u-1", "far") != line_folder("/state", "u-1", "near")


@pytest.mark.parametrize(
    ("said", "locked"),
    [
        ("qemu-img: Could not open 'a.raw': Failed to get \"write\" lock Is another", True),
        ("qemu-img: Could not open 'a.raw': Failed to get shared \"write\" lock", True),
        ('Failed to get shared "consistent read" lock', True),
        ("Failed to get shared lock", True),
        ("Could not open '/srv/lock/a.raw': No such file or directory", False),
        ("Could not open 'a.qcow2': Image is not in qcow2 format: bad block size", False),
        ("Could not open 'a.qcow2': unable to allocate the block map", False),
    ],
)
def test_only_a_lock_of_another_process_is_a_lock(said: str, *, locked: bool) -> None:
    assert is_locked(said) is locked
