"""The head of QEMU's migration stream: read, written anew, and refused where it makes no sense."""

import struct

import pytest

from tests.support.streams import (
    BODY,
    HEAD,
    NAMED,
    NAMES,
    SHORT_STREAM,
    TAIL,
    made,
    parsed,
    recorded,
)
from vmckpt.capture.qemu_stream.header import PAGE, Head, parse_head
from vmckpt.errors import StreamDamaged


def test_without_shared_memory_a_stream_tells_addresses() -> None:
    head, _ = parse_head(SHORT_STREAM)

    assert head.capabilities == ("x-ignore-shared",)
    assert {b.name: b.address for b in head.blocks}["pc.ram"] == 0
    assert head.written(without_shared=True) == SHORT_STREAM[:BODY]
    ordinary, _ = parse_head(head.written() + b"\0")
    assert (ordinary.capabilities, ordinary.blocks[0].address) == ((), None)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("shared")])
def test_a_head_is_written_as_it_came(name: str) -> None:
    data = recorded(name)
    head, length = parse_head(data)

    assert head.written() == data[:length]


def block_list(*sizes: int, total: int | None = None) -> bytes:
    start = HEAD.written().index(struct.pack(">Q", 18 * PAGE | 4))
    listed = b"".join(struct.pack(">B2sQ", 2, b"b%d" % (n % 10), s) for n, s in enumerate(sizes))
    told = sum(sizes) if total is None else total
    end = HEAD.section_end()
    return HEAD.written()[:start] + struct.pack(">Q", told | 4) + listed + end + TAIL


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (block_list(PAGE + 1, PAGE - 1), "invalid size of block 'b0': 4097 bytes"),
        (block_list(0, PAGE), "invalid size of block 'b0': 0 bytes"),
        (block_list(2 * PAGE, total=PAGE), "size of block 'b0': 8192 bytes, with 4096 left"),
        (block_list(*[PAGE] * 11), "block 'b0' occurs twice"),
        (block_list(), "the list of memory blocks is empty"),
        (block_list(1 << 60), "bytes"),
    ],
)
def test_a_list_of_blocks_must_make_sense(data: bytes, message: str) -> None:
    with pytest.raises(StreamDamaged) as caught:
        parsed(data)

    assert message in caught.value.message


def test_a_head_that_is_cut_off_is_refused_wherever_it_ends() -> None:
    _, length = parse_head(SHORT_STREAM)
    for cut in range(length):
        with pytest.raises(StreamDamaged):
            parse_head(SHORT_STREAM[:cut])


def test_a_head_without_end_is_refused() -> None:
    uuid = b"\x05\x12configuration/uuid\0\0\0\x01" + bytes(16)
    begin = b"QEVM\0\0\0\x03\x07\0\0\0\x02pc"
    with pytest.raises(StreamDamaged, match="header is longer than 1048576 bytes"):
        parsed(begin + uuid * 40000)


def test_old_machines_have_neither_configuration_nor_footers() -> None:
    old = Head(machine=None, section=2, instance=0, version=4, footers=False, blocks=HEAD.blocks)
    body = struct.pack(">BI", 2, 2) + NAMED + old.section_end()
    got = parsed(made(body, head=old))

    assert got.head == old
    assert got.seen["pc.ram"] == {0}
    assert got.tail_bytes == TAIL
