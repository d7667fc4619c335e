"""QEMU's migration stream: recorded ones read, cut, damaged, and written anew."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.images import addresses
from tests.support.streams import (
    BODY,
    HEAD,
    NAMED,
    NAMES,
    SHORT_STREAM,
    Collected,
    made,
    parsed,
    record,
    recorded,
)
from vmckpt.capture.qemu_stream import devices
from vmckpt.capture.qemu_stream.header import PAGE, SWITCHOVER_START, parse_head
from vmckpt.capture.qemu_stream.stream import StreamParser, StreamWriter, starts_as_zeros
from vmckpt.errors import StreamDamaged


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_stream_is_read_whole(name: str) -> None:
    got = parsed(recorded(name))
    assert got.head is not None

    assert got.head.machine is not None
    assert got.head.machine.startswith("pc-i440fx-")
    assert got.head.footers
    sizes = {block.name: block.size for block in got.head.blocks}
    assert sizes["pc.ram"] == 16 << 20
    assert sizes["pc.bios"] == 256 << 10
    left_out = {"pc.ram"} if got.head.without_shared else set()
    for block, seen in got.seen.items():
        assert len(seen) == (0 if block in left_out else sizes[block] // PAGE), block
    assert got.memory["pc.bios"][-16:-8] == b"\xea\x5b\xe0\x00\xf0\x30\x36\x2f"
    assert {"timer", "cpu", "globalstate"} <= {one.name for one in devices.sections(got.tail_bytes)}


def test_the_command_of_a_machine_of_qemu_10_is_passed_over() -> None:
    name = "plain-10.0"
    data = recorded(name)
    body = parse_head(data)[1]
    assert data.index(SWITCHOVER_START, body)

    assert SWITCHOVER_START not in parsed(data).tail_bytes


def test_a_run_of_pages_is_handled_as_one() -> None:
    plain = recorded("plain-7.2")

    assert parsed(plain).calls < len(plain) / PAGE / 2


@pytest.mark.parametrize("name", NAMES)
def test_it_does_not_matter_where_a_stream_is_cut(name: str) -> None:
    data = recorded(name)
    whole = parsed(data)

    for step in (4099, 65536):
        cut = parsed(data, step)
        assert (cut.memory, cut.tail_bytes) == (whole.memory, whole.tail_bytes)


def test_a_stream_may_come_byte_by_byte() -> None:
    whole, cut = parsed(SHORT_STREAM), Collected()
    parser = StreamParser(cut)
    for at in range(20000):
        parser.feed(SHORT_STREAM[at : at + 1])
    parser.feed(SHORT_STREAM[20000:])
    parser.finish()

    assert (cut.memory, cut.tail_bytes) == (whole.memory, whole.tail_bytes)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 30000), min_size=1, max_size=60))
def test_any_cuts_give_the_same(sizes: list[int]) -> None:
    whole, cut = parsed(SHORT_STREAM), Collected()
    parser, at = StreamParser(cut), 0
    for size in sizes:
        parser.feed(SHORT_STREAM[at : at + size])
        at += size
    parser.feed(SHORT_STREAM[at:])
    parser.finish()

    assert (cut.memory, cut.tail_bytes) == (whole.memory, whole.tail_bytes)


def test_the_first_page_is_noticed() -> None:
    parser = StreamParser(Collected())
    parser.feed(SHORT_STREAM[:BODY])
    assert not parser.flowing
    parser.feed(SHORT_STREAM[BODY : BODY + 2 * PAGE])
    assert parser.flowing or parser.in_tail
    assert not parser.in_tail


@pytest.mark.parametrize("end", [0, 3, 8, 40, BODY - 1, BODY, BODY + 100, BODY + 9000])
def test_a_stream_that_ends_too_early_is_told(end: int) -> None:
    parser = StreamParser(Collected())
    parser.feed(SHORT_STREAM[:end])

    with pytest.raises(StreamDamaged, match=rf"offset {end}: the stream ends within its"):
        parser.finish()


def section(*records: bytes) -> bytes:
    return struct.pack(">BI", 2, 3) + b"".join(records) + HEAD.section_end()


WRONG = {
    "no magic": (b"LibvirtQemudSave" * 4, "offset 0: magic b'Libv' instead"),
    "version": (b"QEVM\0\0\0\x02" + made(b"")[8:], "offset 4: version 2"),
    "flags": (made(section(NAMED, record(PAGE, 0x100))), "unknown flags 0x100"),
    "xbzrle": (made(section(record(PAGE, 0x40))), "unknown flags 0x40"),
    "multifd": (made(section(record(0, 0x200))), "flags 0x200"),
    "beyond": (made(section(NAMED, record(16 * PAGE, 0x28, bytes(PAGE)))), "at 0x10000, beyond"),
    "far": (made(section(record(1 << 62, 0x02, b"\x03rom\0"))), "beyond a block of 0x2000 bytes"),
    "block": (
        made(section(record(0, 0x02, b"\x03foo\0"))),
        "block 'foo', which the header does not list",
    ),
    "unprintable": (made(section(record(0, 0x02, b"\x03f\no\0"))), "invalid name b'f\\no'"),
    "goes on": (made(section(record(0, 0x28, bytes(PAGE)))), "before any block has started"),
    "filled": (made(section(record(0, 0x02, b"\x03rom\x07"))), "zero page filled with 0x07"),
    "section": (made(struct.pack(">BI", 2, 9) + section()), "part of section 9, which has not"),
    "another": (made(b"\x01\0\0\0\x09"), "section of type 0x01 between memory and devices"),
    "command": (made(b"\x08\0\x04\0\0"), "unknown command 00040000"),
    "footer": (made(struct.pack(">BIQ", 2, 3, 0x10) + b"\x7e\0\0\0\x04"), "footer of section 3"),
    "iterable": (HEAD.written().replace(b"\x03ram", b"\x05block"), "state of 'block' in several"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told_with_its_place(case: str) -> None:
    data, message = WRONG[case]
    with pytest.raises(StreamDamaged) as caught:
        parsed(data)

    assert message in caught.value.message
    assert "migration stream, offset " in caught.value.message
    assert caught.value.hint is not None


@settings(max_examples=150)
@given(st.integers(0, BODY + 12000), st.integers(1, 255))
def test_one_wrong_byte_is_an_error_of_ours_or_none(at: int, change: int) -> None:
    data = bytearray(SHORT_STREAM)
    data[at] ^= change
    try:
        parsed(bytes(data))
    except StreamDamaged:
        pass


@settings(max_examples=100)
@given(st.binary(max_size=400))
def test_noise_is_an_error_of_ours(noise: bytes) -> None:
    # After the head comes memory; what else begins there is devices, whose state is not looked at.
    for begin in (b"", SHORT_STREAM[:60], SHORT_STREAM[:BODY] + b"\x02"):
        with pytest.raises(StreamDamaged):
            parsed(begin + noise)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_written_anew_says_the_same(name: str) -> None:
    first = parsed(recorded(name))
    assert first.head is not None
    out = bytearray()
    writer = StreamWriter(first.head, out.extend)
    writer.opening()
    for block in first.head.blocks:
        present = first.present(block.name)
        pages = np.frombuffer(first.memory[block.name], dtype=np.uint8).reshape(-1, PAGE)
        numbers = np.flatnonzero(present)
        for some in np.array_split(numbers, 3):
            writer.pages(block.name, addresses(some), pages[some])
        writer.zeros(block.name, addresses(np.flatnonzero(~present)))
    writer.closing(first.tail_bytes)
    again = parsed(bytes(out))

    assert again.head is not None
    assert not again.head.without_shared
    assert again.memory == first.memory
    assert again.tail_bytes == first.tail_bytes


def test_a_writer_knows_its_blocks() -> None:
    writer = StreamWriter(HEAD, bytearray().extend)
    with pytest.raises(ValueError, match="no block 'other'"):
        writer.zeros("other", np.zeros(1, dtype=np.uint64))


@pytest.mark.parametrize(
    ("name", "zeros"),
    [("pc.ram", True), ("ram-node0", True), ("mach-virt.ram", True), ("pc.bios", False),
     ("0000:00:02.0/virtio-net-pci.rom", False), ("nvdimm0", False), ("pc.ram.old", False)],
)  # fmt: skip
def test_only_main_memory_is_known_to_start_as_zeros(name: str, zeros: bool) -> None:
    assert starts_as_zeros(name) is zeros
