"""Core files: where the guest sees its memory, and the file itself."""

import os
import struct
import subprocess
from pathlib import Path

import pytest

from tests.support.images import write_core
from tests.support.streams import frozen, parsed, recorded
from vmckpt.capture.qemu_stream import devices, elf_core
from vmckpt.capture.qemu_stream.elf_core import Stretch
from vmckpt.capture.qemu_stream.header import RamBlock

GIB = 1 << 30


@pytest.mark.parametrize(
    ("machine", "sizes", "expected"),
    [
        ("pc-i440fx-7.2", [2 * GIB], [(0, 0, 2 * GIB)]),
        ("pc-i440fx-7.2", [4 * GIB], [(0, 0, 3 * GIB), (3 * GIB, 4 * GIB, GIB)]),
        ("pc-q35-7.2", [2 * GIB], [(0, 0, 2 * GIB)]),
        ("pc-q35-7.2", [3 * GIB], [(0, 0, 2 * GIB), (2 * GIB, 4 * GIB, GIB)]),
        ("pc-q35-7.2", [GIB, 3 * GIB],
         [(0, 0, GIB), (0, GIB, GIB), (GIB, 4 * GIB, 2 * GIB)]),
    ],
)  # fmt: skip
def test_the_usual_layout_has_a_hole_below_4_gib(
    machine: str, sizes: list[int], expected: list[tuple[int, int, int]]
) -> None:
    blocks = [RamBlock(f"ram-node{n}", size) for n, size in enumerate(sizes)]
    got = elf_core.usual_layout(blocks, machine)

    assert [(one.offset, one.start, one.size) for one in got] == expected


def test_a_core_has_memory_where_the_guest_sees_it(tmp_path: Path) -> None:
    made = frozen(tmp_path / "image")
    blocks = [block for block in made.blocks if block.name == "pc.ram"]
    size, hole = blocks[0].size, 12 << 20
    stretches = (
        Stretch("pc.ram", 0, 0, hole),
        Stretch("pc.bios", 0, 0xFFFC0000, 0x40000),
        Stretch("pc.ram", hole, 4 * GIB, size - hole),
    )
    path = tmp_path / "core"
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    write_core(file, made, stretches, devices.processors(made.tail()))
    os.close(file)
    data, memory = path.read_bytes(), parsed(recorded("background-7.2")).memory

    assert (data[:4], struct.unpack_from("<HH", data, 16)) == (b"\x7fELF", (4, 62))
    count = struct.unpack_from("<H", data, 56)[0]
    headers = [struct.unpack_from("<IIQQQQQQ", data, 64 + 56 * n) for n in range(count)]
    assert [header[0] for header in headers] == [4, 1, 1, 1]
    for header, stretch in zip(headers[1:], stretches, strict=True):
        _, _, at, virtual, physical, in_file, in_memory, _ = header
        assert (virtual, physical) == (stretch.start, stretch.start)
        assert (in_file, in_memory) == (stretch.size, stretch.size)
        expected = memory[stretch.block][stretch.offset : stretch.offset + stretch.size]
        assert data[at : at + in_file] == bytes(expected)
    assert path.stat().st_blocks * 512 < size / 2


def test_readelf_understands_the_notes(tmp_path: Path) -> None:
    made = frozen(tmp_path / "image")
    file = os.open(tmp_path / "core", os.O_RDWR | os.O_CREAT)
    layout = elf_core.usual_layout([made.blocks[0]], "pc")
    write_core(file, made, layout, devices.processors(made.tail()))
    os.close(file)
    told = subprocess.run(
        ["/usr/bin/readelf", "-hln", tmp_path / "core"], capture_output=True, text=True, check=True
    )

    assert told.stderr == ""
    assert "CORE                 0x00000150\tNT_PRSTATUS" in told.stdout
    assert "QEMU                 0x000001b8" in told.stdout
