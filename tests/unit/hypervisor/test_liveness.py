"""Whether a restored guest lives, by what was seen of it."""

import libvirt

from vmckpt.hypervisor.liveness import pulse
from vmckpt.model.guest import GuestState
from vmckpt.units import Seconds

STATS: dict[str, int | str | float | bool] = {
    "state.state": libvirt.VIR_DOMAIN_RUNNING, "state.reason": 1, "vcpu.current": 2,
    "vcpu.0.time": 1_500_000_000, "vcpu.1.time": 500_000_000, "block.count": 2,
    "block.0.rd.bytes": 10, "block.1.rd.bytes": 5, "block.0.wr.bytes": 7,
    "dirtyrate.megabytes_per_second": 3,
}  # fmt: skip


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
