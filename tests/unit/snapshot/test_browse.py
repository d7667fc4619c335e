"""Looking into a snapshot: partitions, single files, disks over NBD, memory as a core."""

from dataclasses import replace

import pytest

from tests.support.snapshots import PUBLIC, bare, ram
from vmckpt.errors import BadInput
from vmckpt.snapshot.browse import layout
from vmckpt.store.format.metadata import Contents


def test_a_core_needs_memory_of_a_known_kind() -> None:
    private = bare([ram([1])], [])
    public = replace(PUBLIC, arch="x86_64", machine="pc-i440fx-7.2", contents=Contents.MEMORY)
    assert [one.block for one in layout(public, private)] == ["pc.ram"]
    for wrong, why in (
        (replace(public, contents=Contents.DISKS), "no memory"),
        (replace(public, arch="aarch64"), "x86_64"),
    ):
        with pytest.raises(BadInput, match=why):
            layout(wrong, private)
    with pytest.raises(BadInput, match="no RAM block recognised as main memory"):
        layout(public, bare([ram([1], "virt.flash0")], []))
