"""Whether a restored guest lives, by what was seen of it."""

from dataclasses import replace

import libvirt
import pytest

from vmckpt.hypervisor.liveness import pulse
from vmckpt.model.guest import GuestState, Pulse
from vmckpt.snapshot.verify import heartbeat
from vmckpt.units import Bytes, Seconds

FIRST = Pulse(
    at=Seconds(0.0), state=GuestState.RUNNING, panicked=False, io_error=False, processors=2,
    worked=Seconds(100.0), read=Bytes(1000), written=Bytes(1000), dirtied=False,
)  # fmt: skip
IDLE = replace(FIRST, at=Seconds(10.0), worked=Seconds(100.2))
BUSY = replace(IDLE, worked=Seconds(120.0))
STATS: dict[str, int | str | float | bool] = {
    "state.state": libvirt.VIR_DOMAIN_RUNNING, "state.reason": 1, "vcpu.current": 2,
    "vcpu.0.time": 1_500_000_000, "vcpu.1.time": 500_000_000, "block.count": 2,
    "block.0.rd.bytes": 10, "block.1.rd.bytes": 5, "block.0.wr.bytes": 7,
    "dirtyrate.megabytes_per_second": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("last", "agent", "lives", "why"),
    [
        (IDLE, None, True, "worked 1% of 10 s, and it wrote hardly anything"),
        (replace(IDLE, written=Bytes(2000)), None, True, "wrote to its disks"),
        (replace(BUSY, dirtied=True), None, True, "worked 100% of 10 s, and it wrote to memory"),
        (BUSY, None, False, "turns in a circle"),
        (replace(IDLE, worked=FIRST.worked), None, False, "did nothing at all"),
        (replace(BUSY, panicked=True, state=GuestState.CRASHED), True, False, "kernel panicked"),
        (replace(IDLE, state=None), None, False, "ended by itself"),
        (replace(IDLE, state=GuestState.SHUT_OFF), True, False, "ended by itself"),
        (replace(IDLE, state=GuestState.PAUSED), None, False, "stands still"),
        (replace(IDLE, state=GuestState.PAUSED, io_error=True), None, False, "a disk cannot be"),
        (BUSY, True, True, "its agent answers"),
        (IDLE, False, False, "its agent does not answer any more"),
    ],
)
def test_a_guest_is_judged_by_what_it_did(
    last: Pulse, agent: bool | None, lives: bool, why: str
) -> None:
    found = heartbeat.evaluate([FIRST, last], agent=agent)
    assert (found.lives, why in found.why) == (lives, True), found


def test_one_look_is_read_out_of_libvirts_statistics() -> None:
    found = pulse(STATS, Seconds(3.0))
    assert (found.state, found.processors, found.worked) == (GuestState.RUNNING, 2, 2.0)
    assert (found.read, found.written, found.dirtied) == (15, 7, True)
    panicked = pulse(
        {
            "state.state": libvirt.VIR_DOMAIN_CRASHED,
            "state.reason": libvirt.VIR_DOMAIN_CRASHED_PANICKED,
        },
        Seconds(0.0),
    )
    assert panicked.panicked
    stopped = {
        **STATS,
        "state.state": libvirt.VIR_DOMAIN_PAUSED,
        "state.reason": libvirt.VIR_DOMAIN_PAUSED_IOERROR,
    }
    assert pulse(stopped, Seconds(0.0)).io_error
