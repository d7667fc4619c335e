"""Whether there is room for one more copy of a guest."""

import re
from dataclasses import replace

import pytest

from vmckpt.replication.test_failover import memory_check
from vmckpt.replication.test_failover.memory_check import KEPT, Room
from vmckpt.units import GIB, MIB, Bytes

ENOUGH = Room(
    wanted=Bytes(4 * GIB), shared=Bytes(5 * GIB), memory=Bytes(5 * GIB), disks=Bytes(2 * GIB)
)


@pytest.mark.parametrize(
    "room",
    [
        ENOUGH,
        replace(ENOUGH, disks=None),
        replace(ENOUGH, disks=KEPT),
        replace(ENOUGH, shared=Bytes(4 * GIB + 512 * MIB)),
    ],
)
def test_with_room_there_can_be_a_test(room: Room) -> None:
    assert memory_check.why_not(room) is None


@pytest.mark.parametrize(
    ("room", "why"),
    [
        (replace(ENOUGH, memory=Bytes(4 * GIB)), r"4\.0 GiB of free memory; .* needs 4\.5 GiB"),
        (replace(ENOUGH, shared=Bytes(3 * GIB)), r"3\.0 GiB free on the tmpfs for memory"),
        (
            replace(ENOUGH, disks=Bytes(100 * MIB)),
            "100 MiB free on the file system of the standby's images",
        ),
    ],
)
def test_what_is_short_is_named(room: Room, why: str) -> None:

    told = memory_check.why_not(room)
    assert told is not None
    assert re.search(why, told)


def test_a_test_ends_before_the_standby_has_no_room() -> None:
    assert not memory_check.runs_out(KEPT)
    assert not memory_check.runs_out(Bytes(KEPT // 2))
    assert memory_check.runs_out(Bytes(KEPT // 2 - 1))
