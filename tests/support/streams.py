"""Recorded streams, a sink that collects what is in one, and the image that one makes."""

import struct
from pathlib import Path

import numpy as np
import zstandard

from tests.support.paths import FIXTURES
from vmckpt.capture.memory.image import FrozenImage, ImageWriter
from vmckpt.capture.qemu_stream.header import PAGE, Head, RamBlock, parse_head
from vmckpt.capture.qemu_stream.stream import Addresses, Pages, StreamParser

FOLDER = FIXTURES / "streams"
NAMES = sorted(path.stem for path in FOLDER.glob("*.zst"))
# The smallest there is with everything in it: tests that repeat use it.
SHORT = "shared-7.2"


def recorded(name: str) -> bytes:
    """A stream as QEMU wrote it; tests/fixtures/make_streams.py tells how."""
    return zstandard.ZstdDecompressor().decompress((FOLDER / f"{name}.zst").read_bytes())


class Collected:
    """What came out of a stream."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self.memory: dict[str, bytearray] = {}
        self.seen: dict[str, set[int]] = {}
        self.calls = 0
        self.tail_bytes = b""

    def begin(self, head: Head) -> None:
        self.head = head
        self.memory = {block.name: bytearray(block.size) for block in head.blocks}
        self.seen = {block.name: set() for block in head.blocks}

    def _name(self, block: int) -> str:
        assert self.head is not None
        self.calls += 1
        return self.head.blocks[block].name

    def pages(self, block: int, addresses: Addresses, data: Pages) -> None:
        name = self._name(block)
        for address, page in zip(addresses.tolist(), data, strict=True):
            self.memory[name][address : address + PAGE] = page.tobytes()
            self.seen[name].add(address)

    def zeros(self, block: int, addresses: Addresses) -> None:
        name = self._name(block)
        for address in addresses.tolist():
            self.memory[name][address : address + PAGE] = bytes(PAGE)
            self.seen[name].add(address)

    def tail(self, data: memoryview) -> None:
        self.tail_bytes += bytes(data)

    def present(self, name: str) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        pages = np.frombuffer(self.memory[name], dtype=np.uint8).reshape(-1, PAGE)
        return np.asarray(pages.any(axis=1))


def parsed(data: bytes, step: int = 1 << 20) -> Collected:
    sink = Collected()
    parser = StreamParser(sink)
    for at in range(0, len(data), step):
        parser.feed(data[at : at + step])
    parser.finish()
    return sink


SHORT_STREAM = recorded(SHORT)


# Where the first section with pages begins.
BODY = parse_head(SHORT_STREAM)[1]


HEAD = Head(
    machine="pc", section=3, instance=0, version=4, footers=True,
    blocks=(RamBlock("pc.ram", 16 * PAGE), RamBlock("rom", 2 * PAGE)),
)  # fmt: skip


TAIL = b"\x04devices\x00"


def made(body: bytes, *, head: Head = HEAD) -> bytes:
    return head.written() + body + TAIL


def record(address: int, flags: int, rest: bytes = b"") -> bytes:
    return struct.pack(">Q", address | flags) + rest


NAMED = record(0, 0x08, b"\x06pc.ram" + bytes(PAGE))


def frozen(folder: Path, name: str = "background-7.2") -> FrozenImage:
    """The image that a recorded stream makes."""
    writer = ImageWriter(folder)
    parser = StreamParser(writer)
    parser.feed(recorded(name))
    parser.finish()
    return writer.finish()
