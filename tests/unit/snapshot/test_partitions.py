"""Partitions and file systems, from a few sectors of a disk."""

import struct

import pytest

from tests.support.partitioned import MIB, table
from vmckpt.snapshot import partitions
from vmckpt.snapshot.partitions import Part


def found(data: bytes) -> tuple[Part, ...]:
    return partitions.parts(lambda at, length: data[at : at + length], len(data))


def with_ext(disk: bytearray, start: int) -> None:
    disk[start + 1080 : start + 1082] = b"\x53\xef"


def test_partitions_of_an_old_table_and_of_its_chain() -> None:
    disk = bytearray(8 * MIB)
    disk[:512] = table([(0x83, 2048, 2048), (0x05, 4096, 8192)])
    disk[4096 * 512 : 4097 * 512] = table([(0x83, 64, 1024), (0x05, 4096, 4096)])
    disk[8192 * 512 : 8193 * 512] = table([(0x83, 64, 1024)])
    with_ext(disk, 2048 * 512)
    disk[(4096 + 64) * 512 : (4096 + 64) * 512 + 4] = b"XFSB"

    assert found(bytes(disk)) == (
        Part(1, MIB, MIB, "ext4"),
        Part(5, (4096 + 64) * 512, MIB // 2, "xfs"),
        Part(6, (8192 + 64) * 512, MIB // 2, ""),
    )


def test_partitions_of_a_new_table() -> None:
    disk = bytearray(4 * MIB)
    disk[:512] = table([(0xEE, 1, 8191)])
    disk[512:520] = b"EFI PART"
    struct.pack_into("<QII", disk, 512 + 72, 2, 128, 128)
    entry = b"T" * 16 + b"U" * 16 + struct.pack("<QQ", 2048, 4095)
    disk[1024 + 128 : 1024 + 128 + len(entry)] = entry
    with_ext(disk, MIB)

    assert found(bytes(disk)) == (Part(2, MIB, MIB, "ext4"),)


@pytest.mark.parametrize(
    "disk",
    [
        b"", bytes(100), bytes(MIB), b"\xff" * MIB,
        # Chains that bite their tails, and rows that lie outside the disk.
        table([(0x05, 0, 100)]) + bytes(MIB), table([(0x83, 1, 1 << 31)]) + bytes(MIB),
        table([(0xEE, 1, 1)]) + b"EFI PART" + b"\xff" * 4096,
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_one_disk_with_nothing_known(disk: bytes) -> None:
    assert found(disk) == (Part(0, 0, len(disk), ""),)
