"""Which way a guest is captured, and what the next snapshot goes on from."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from vmckpt.agent.snapshot import choose_method
from vmckpt.agent.snapshot import parent_state as snapshot_parent_state
from vmckpt.agent.snapshot.choose_method import CaptureFacts, MemoryMethod
from vmckpt.agent.snapshot.create import RamRegion
from vmckpt.agent.snapshot.memory_methods import Memory
from vmckpt.capture.memory.image import FrozenImage
from vmckpt.store import parent_state
from vmckpt.store.format.chunk_map import SLOTS, ZERO, Extent, Kind, What
from vmckpt.store.format.metadata import PrivateFacts
from vmckpt.store.format.private_part import Private, RegionMap
from vmckpt.store.parent_state import Draft
from vmckpt.units import GIB, Bytes, Seconds

TRACKED = CaptureFacts(runs=True, untracked=None, private="its memory is private to QEMU")
SHARED = CaptureFacts(
    runs=True, untracked="the kernel is old", private=None, memory=Bytes(GIB), room=Bytes(2 * GIB)
)  # fmt: skip
KEPT = replace(SHARED, kept=True, room=Bytes(0))
PRIVATE = replace(TRACKED, untracked="the kernel is old")


@pytest.mark.parametrize(
    ("asked", "seen", "way", "why", "against"),
    [
        (MemoryMethod.AUTO, TRACKED, MemoryMethod.TRACKING, "any memory", None),
        (MemoryMethod.AUTO, replace(KEPT, untracked=None), MemoryMethod.TRACKING, "any", None),
        (
            MemoryMethod.AUTO,
            replace(TRACKED, runs=False),
            MemoryMethod.BACKGROUND,
            "the guest is not running",
            None,
        ),
        (MemoryMethod.TRACKING, TRACKED, MemoryMethod.TRACKING, "requested", None),
        (MemoryMethod.TRACKING, PRIVATE, MemoryMethod.TRACKING, "requested", "kernel is old"),
        (
            MemoryMethod.TRACKING,
            replace(TRACKED, runs=False),
            MemoryMethod.TRACKING,
            "requested",
            "the guest is not running",
        ),
        (MemoryMethod.AUTO, PRIVATE, MemoryMethod.BACKGROUND, "the kernel is old", None),
        (MemoryMethod.AUTO, SHARED, MemoryMethod.BACKGROUND, "the kernel is old", None),
        (
            MemoryMethod.AUTO,
            KEPT,
            MemoryMethod.SHARED,
            "the host has a copy of the guest's memory from an earlier snapshot",
            None,
        ),
        (
            MemoryMethod.AUTO,
            replace(KEPT, runs=False),
            MemoryMethod.BACKGROUND,
            "is not running",
            None,
        ),
        (MemoryMethod.SHARED, SHARED, MemoryMethod.SHARED, "requested", None),
        (MemoryMethod.SHARED, KEPT, MemoryMethod.SHARED, "requested", None),
        (
            MemoryMethod.SHARED,
            replace(SHARED, room=Bytes(GIB)),
            MemoryMethod.SHARED,
            "requested",
            "its host has only",
        ),
        (MemoryMethod.SHARED, PRIVATE, MemoryMethod.SHARED, "requested", "private to QEMU"),
        (
            MemoryMethod.SHARED,
            replace(KEPT, runs=False),
            MemoryMethod.SHARED,
            "requested",
            "is not running",
        ),
        (MemoryMethod.BACKGROUND, KEPT, MemoryMethod.BACKGROUND, "requested", None),
        (MemoryMethod.LIBVIRT, KEPT, MemoryMethod.LIBVIRT, "requested", None),
    ],
)
def test_the_way_is_decided_and_the_reason_told(
    asked: MemoryMethod, seen: CaptureFacts, way: MemoryMethod, why: str, against: str | None
) -> None:
    found = choose_method.choose(asked, seen)
    assert found.way is way
    assert why in found.why
    assert (found.against is None) == (against is None)
    assert (against or "") in (found.against or "")


def test_only_who_did_not_ask_for_a_way_gets_another() -> None:
    assert (
        choose_method.otherwise(MemoryMethod.AUTO, MemoryMethod.TRACKING) is MemoryMethod.BACKGROUND
    )
    assert choose_method.otherwise(MemoryMethod.TRACKING, MemoryMethod.TRACKING) is None
    assert (
        choose_method.otherwise(MemoryMethod.AUTO, MemoryMethod.SHARED) is MemoryMethod.BACKGROUND
    )
    assert (
        choose_method.otherwise(MemoryMethod.AUTO, MemoryMethod.BACKGROUND) is MemoryMethod.LIBVIRT
    )
    assert choose_method.otherwise(MemoryMethod.AUTO, MemoryMethod.LIBVIRT) is None
    assert choose_method.otherwise(MemoryMethod.BACKGROUND, MemoryMethod.BACKGROUND) is None
    assert choose_method.otherwise(MemoryMethod.SHARED, MemoryMethod.SHARED) is None


def memory(**more: Any) -> Memory:
    usual: dict[str, Any] = {
        "image": None, "pause": Seconds(0.0), "way": MemoryMethod.SHARED, "why": "",
        "changed": {}, "since": 7, "copy": 8,
    }  # fmt: skip
    return Memory(**(usual | more))


def kept(
    folder: Path, memory_: Memory | None, *, snapshot: str, ram: bool
) -> parent_state.ParentState:
    """The line after one more snapshot with a disk, and perhaps memory."""
    disk = RegionMap(
        name="vda", kind=Kind.DISK, size=Bytes(2 * 65536), map=np.array([1, ZERO], dtype=np.uint32)
    )
    block = RegionMap(
        name="pc.ram", kind=Kind.RAM, size=Bytes(3 * 4096),
        map=np.array([SLOTS * 1 + 5, ZERO, 2], dtype=np.uint32),
    )  # fmt: skip
    facts = PrivateFacts(domain_xml="", cpu_xml=None, boot_files=(), ram=(), disks=())
    chunks = [b"a" * 32, b"b" * 32] if ram else [b"c" * 32]
    private = Private(
        facts=facts, chunks=chunks, regions=(disk, block) if ram else (disk,), files={}
    )
    past = parent_state.load(folder)
    with Draft(folder) as draft:
        if ram:
            draft.prints("pc.ram", Kind.RAM, 3 * 4096)[:] = np.array([b"x" * 16] * 3, dtype="V16")
        snapshot_parent_state.keep(
            draft, private, past,
            snapshot_parent_state.End(
                snapshot=snapshot, epoch=0, made_at=5,
                checkpoint=snapshot, memory=memory_,
            ),
        )  # fmt: skip
    found = parent_state.load(folder)
    assert found is not None
    return found


def test_memory_goes_on_after_a_snapshot_without_it(tmp_path: Path) -> None:
    kept(tmp_path / "u-near", memory(), snapshot="s-1", ram=True)
    found = kept(tmp_path / "u-near", None, snapshot="s-2", ram=False)

    region = found.regions["pc.ram"]
    assert region.map[1] == ZERO
    first, last = int(region.map[0]), int(region.map[2])
    assert (found.chunks[first // SLOTS], first % SLOTS) == (b"b" * 32, 5)
    assert (found.chunks[last // SLOTS], last % SLOTS) == (b"a" * 32, 2)
    assert region.prints is not None
    assert region.prints[0].tobytes() == b"x" * 16
    assert (found.extra["copy"], found.snapshot) == (8, "s-2")
    parent = snapshot_parent_state.parent(found)
    assert parent is not None
    assert (parent.id, parent.sizes) == ("s-2", {"vda": 2 * 65536})


def test_changes_count_only_against_the_copy_that_the_line_ends_with(tmp_path: Path) -> None:
    found = kept(tmp_path / "u-near", memory(), snapshot="s-1", ram=True)
    assert snapshot_parent_state.unchanged(found, memory(since=8))
    assert not snapshot_parent_state.unchanged(found, memory(since=7))
    assert not snapshot_parent_state.unchanged(found, memory(since=None, changed=None))
    assert not snapshot_parent_state.unchanged(None, memory(since=8))
    other = kept(tmp_path / "u-far", memory(copy=None), snapshot="s-2", ram=True)
    assert not snapshot_parent_state.unchanged(other, memory(since=None))


def test_a_guest_that_is_off_leaves_the_checkpoint_of_the_snapshot_before(tmp_path: Path) -> None:
    found = kept(tmp_path / "u-near", memory(), snapshot="s-1", ram=True)
    off = replace(found, snapshot="s-2", extra={**found.extra, "checkpoint": "s-1"})
    never = replace(found, extra={**found.extra, "checkpoint": None})
    old = replace(found, extra={})
    assert [snapshot_parent_state.checkpoint(one) for one in (found, off, never, old)] == [
        "s-1", "s-1", None, "s-1",
    ]  # fmt: skip
    assert snapshot_parent_state.parent(never) is None
    assert snapshot_parent_state.others(tmp_path / "u-far", "u") == ["s-1"]


class Image:
    """Stands for a frozen image of one block of six pages."""

    blocks = (type("Block", (), {"name": "pc.ram", "size": 6 * 4096})(),)

    def file(self, _: int) -> Path:
        return Path("/dev/null")

    def present(self, _: int) -> Any:
        return np.array([1, 1, 0, 1, 1, 0], dtype=np.bool_)


def test_pages_that_did_not_change_are_named_and_not_read() -> None:
    image = cast("FrozenImage", Image())
    changed = np.array([0, 1, 1, 0, 0, 0], dtype=np.bool_)
    assert list(RamRegion(image, 0, changed).extents()) == [
        Extent(0, 1, What.SAME), Extent(1, 1, What.DATA), Extent(2, 1, What.ZEROS),
        Extent(3, 2, What.SAME), Extent(5, 1, What.ZEROS),
    ]  # fmt: skip
    assert {one.what for one in RamRegion(image, 0).extents()} == {What.DATA, What.ZEROS}
    copied = np.array([1, 1, 0, 0, 1, 0], dtype=np.bool_)
    assert list(RamRegion(image, 0, changed, copied).extents()) == [
        Extent(0, 1, What.SAME), Extent(1, 1, What.DATA), Extent(2, 1, What.ZEROS),
        Extent(3, 1, What.UNREAD), Extent(4, 1, What.SAME), Extent(5, 1, What.ZEROS),
    ]  # fmt: skip
