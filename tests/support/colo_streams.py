"""What QEMU sends in its COLO stream, of a guest with sixteen pages."""

import json
import struct

import numpy as np

from vmckpt.capture.qemu_stream.header import DESCRIPTION, EOF, FULL, PAGE, Head, RamBlock
from vmckpt.capture.qemu_stream.stream import StreamWriter
from vmckpt.replication.dirty_pages import colo_parser

HEAD = Head(
    machine="pc-i440fx-7.2", section=2, instance=0, version=4, footers=True,
    blocks=(RamBlock("pc.ram", 16 * PAGE), RamBlock("pc.bios", 4 * PAGE)),
)  # fmt: skip


COMMAND = bytes.fromhex("08 0008 0000")


DEVICES = struct.pack(">BI", FULL, 7) + b"\x05timer" + bytes(20) + b"\x7e" + bytes(4)


DESCRIBED = json.dumps({"devices": []}).encode()


TAIL = DEVICES + bytes([EOF, DESCRIPTION]) + struct.pack(">I", len(DESCRIBED)) + DESCRIBED


STATE = DEVICES + bytes([EOF])


def word(number: int) -> bytes:
    return struct.pack(">I", number)


def pages(block: str, *numbers: int, fill: int) -> bytes:
    out: list[bytes] = []
    writer = StreamWriter(HEAD, lambda data: out.append(bytes(data)))
    addresses = np.array(numbers, dtype=np.uint64) * np.uint64(PAGE)
    writer.pages(block, addresses, np.full((len(numbers), PAGE), fill, dtype=np.uint8))
    return b"".join(out)


def opening() -> bytes:
    """The head as QEMU writes it with COLO: a command before memory."""
    plain = HEAD.written()
    at = plain.index(HEAD.machine.encode()) + len(HEAD.machine) if HEAD.machine else 0
    return plain[:at] + COMMAND + plain[at:]


FIRST = opening() + pages("pc.ram", *range(16), fill=1) + pages("pc.bios", 0, 1, fill=9) + TAIL


def checkpoint(*numbers: int, fill: int, state: bytes = STATE) -> bytes:
    """What QEMU sends after our reply."""
    memory = pages("pc.ram", *numbers, fill=fill) if numbers else b""
    sized = word(colo_parser.SIZE) + struct.pack(">Q", len(state)) + state
    return word(colo_parser.SEND) + memory + bytes([EOF]) + sized
