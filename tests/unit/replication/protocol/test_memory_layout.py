"""The blocks of memory that two agents mean by their numbers."""

import json
from typing import Any

import pytest

from vmckpt.replication.protocol.memory_layout import Dimm, Layout, difference
from vmckpt.replication.protocol.messages import Damaged

DIMM = Dimm(name="dimm0", size=1 << 27, node=1, slot=2, address=0x100000000)
LAYOUT = Layout(blocks=(("memdimm0", 1 << 27), ("pc.ram", 1 << 28)), dimms=(DIMM,))


def test_what_is_written_is_read() -> None:
    assert Layout.parse(LAYOUT.to_bytes()) == LAYOUT
    assert Layout.parse(Layout(blocks=()).to_bytes()) == Layout(blocks=())


def test_a_dimm_is_what_qemu_says_of_it() -> None:
    told = {
        "memdev": "/objects/memdimm0", "hotplugged": True, "addr": 0x100000000,
        "hotpluggable": True, "size": 1 << 27, "slot": 2, "node": 1, "id": "dimm0",
    }  # fmt: skip
    assert Dimm.from_qmp(told) == DIMM


@pytest.mark.parametrize("name", ["dimm0", "dimm255", "ua-more_memory-1"])
def test_a_dimm_has_a_name_that_libvirt_gives(name: str) -> None:
    assert _with(name=name).dimms[0].name == name


@pytest.mark.parametrize("wrong", [
    {"name": "disk0"}, {"name": ""}, {"name": "dimm0'/><hostdev/>"}, {"name": "ua-\n"},
    {"size": "big"}, {"size": -1}, {"slot": 1.5}, {"address": 1 << 63}, {"node": True},
])  # fmt: skip
def test_a_dimm_that_could_be_something_else_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Damaged, match="invalid list of memory blocks"):
        _with(**wrong)


@pytest.mark.parametrize("data", [
    b"", b"[]", b"{}", b'{"blocks": [], "dimms": [7]}', b'{"blocks": [["ram"]], "dimms": []}',
    b'{"blocks": [["ram", "big"]], "dimms": []}', b"[" * 5000, b"\xff",
])  # fmt: skip
def test_what_is_no_layout_is_refused(data: bytes) -> None:
    with pytest.raises(Damaged):
        Layout.parse(data)


def _with(**changes: Any) -> Layout:
    told = json.loads(LAYOUT.to_bytes())
    told["dimms"][0] |= changes
    return Layout.parse(json.dumps(told).encode())


A, B, C = ("pc.ram", 4096), ("memdimm0", 8192), ("vga.vram", 4096)


@pytest.mark.parametrize(("guest", "standby", "why"), [
    ([A, C], [A, C], None),
    ([B, A, C], [A, C], "the standby lacks memdimm0"),
    ([A, C], [B, A, C], "the standby also has memdimm0"),
    ([A], [("pc.ram", 8192)], "the standby lacks pc.ram and also has pc.ram"),
    ([A, C], [C, A], "the standby has the same blocks in another order"),
])  # fmt: skip
def test_blocks_that_differ_are_named(
    guest: list[tuple[str, int]], standby: list[tuple[str, int]], why: str | None
) -> None:
    assert difference(guest, standby) == why
