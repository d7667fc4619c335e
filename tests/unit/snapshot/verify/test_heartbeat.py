"""Whether a restored guest lives, by what was seen of it."""

from dataclasses import replace

import pytest

from vmckpt.model.guest import GuestState, Pulse
from vmckpt.snapshot.verify import heartbeat
from vmckpt.units import Bytes, Seconds

FIRST = Pulse(
    at=Seconds(0.0), state=GuestState.RUNNING, panicked=False, io_error=False, processors=2,
    worked=Seconds(100.0), read=Bytes(1000), written=Bytes(1000), dirtied=False,
)  # fmt: skip
IDLE = replace(FIRST, at=Seconds(10.0), worked=Seconds(100.2))
BUSY = replace(IDLE, worked=Seconds(120.0))


@pytest.mark.parametrize(
    ("last", "agent", "lives", "why"),
    [
        (IDLE, None, True, "busy 1% of 10 s, and it wrote almost nothing"),
        (replace(IDLE, written=Bytes(2000)), None, True, "wrote to its disks"),
        (
            replace(BUSY, dirtied=True),
            None,
            True,
            "100% of 10 s, and it read its disks or wrote to memory",
        ),
        (BUSY, None, False, "may be in an endless loop"),
        (replace(IDLE, worked=FIRST.worked), None, False, "did not run"),
        (replace(BUSY, panicked=True, state=GuestState.CRASHED), True, False, "kernel panicked"),
        (replace(IDLE, state=None), None, False, "stopped by itself"),
        (replace(IDLE, state=GuestState.SHUT_OFF), True, False, "stopped by itself"),
        (replace(IDLE, state=GuestState.PAUSED), None, False, "is paused"),
        (replace(IDLE, state=GuestState.PAUSED, io_error=True), None, False, "by a disk I/O error"),
        (BUSY, True, True, "its guest agent answers"),
        (IDLE, False, False, "its guest agent no longer answers"),
    ],
)
def test_a_guest_is_judged_by_what_it_did(
    last: Pulse, agent: bool | None, lives: bool, why: str
) -> None:
    found = heartbeat.evaluate([FIRST, last], agent=agent)
    assert (found.lives, why in found.why) == (lives, True), found
