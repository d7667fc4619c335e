"""Blocks of memory that are found by a mark."""

import os
from pathlib import Path

from tests.support.written_process import WrittenProcess
from vmckpt.capture.memory import marked_blocks
from vmckpt.capture.memory.marked_blocks import Mark, MemoryMapping
from vmckpt.capture.memory.write_tracking import MemoryRange

MAPS = """\
7f0000000000-7f0000100000 rw-p 00000000 00:00 0
7f0000200000-7f0000300000 r--p 00001000 fe:00 77                         /usr/lib/libc.so.6
7f0000400000-7f0000500000 rw-s 00002000 00:01 99                         /memfd:pc.ram (deleted)
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]
"""


def test_only_mappings_that_can_be_written_may_hold_a_block() -> None:
    assert list(marked_blocks.mappings(MAPS)) == [
        MemoryMapping(0x7F0000000000, 0x7F0000100000, shared=False, offset=0, inode=0),
        MemoryMapping(0x7F0000400000, 0x7F0000500000, shared=True, offset=0x2000, inode=99),
        MemoryMapping(0x7FFD00000000, 0x7FFD00021000, shared=False, offset=0, inode=0),
    ]


def put(process: WrittenProcess, address: int, content: bytes) -> None:
    file = os.open(f"/proc/{process.held.pid}/mem", os.O_RDWR)
    try:
        os.pwrite(file, content, address)
    finally:
        os.close(file)


def test_a_block_is_where_its_mark_is() -> None:
    mark = Mark("pc.ram", os.urandom(4096), 256 * 4096)
    with WrittenProcess() as process:
        assert marked_blocks.find(process.held, [mark]) == {}
        put(process, process.range.start, mark.content)
        (name, found), *_ = marked_blocks.find(process.held, [mark]).items()
        assert (name, found.range) == ("pc.ram", process.range)
        assert found.mapping.inode == 0


def test_a_mapping_that_the_kernel_joined_with_one_below_is_found_by_its_end() -> None:
    mark = Mark("pc.ram", os.urandom(4096), 100 * 4096)
    with WrittenProcess() as process:
        maps = Path(f"/proc/{process.held.pid}/maps").read_text()
        within = process.range.start
        mapping = next(one for one in marked_blocks.mappings(maps) if one.start <= within < one.end)
        at = mapping.end - mark.size
        put(process, at, mark.content)
        found = marked_blocks.find(process.held, [mark])
        assert found["pc.ram"].range == MemoryRange(at, mark.size)


def test_a_block_larger_than_any_mapping_is_not_found() -> None:
    mark = Mark("pc.ram", os.urandom(4096), 1 << 40)
    with WrittenProcess() as process:
        put(process, process.range.start, mark.content)
        assert marked_blocks.find(process.held, [mark]) == {}
