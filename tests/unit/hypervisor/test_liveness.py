"""Whether a restored guest lives, by what was seen of it."""

from collections.abc import Callable
from typing import Any, cast

import libvirt
import pytest

from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.liveness import pulse, sample_liveness
from vmckpt.model.guest import GuestState, Pulse
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


class Refused(libvirt.libvirtError):
    """An error of libvirt with this code; 0: the connection broke, and there is none."""

    def __init__(self, code: int) -> None:
        super().__init__("no answer")
        self._code = code

    def get_error_code(self) -> int:
        return self._code


class Answers:
    """A host whose libvirt answers every lookup with one error."""

    def __init__(self, code: int) -> None:
        self._code = code

    async def query(self, _what: str, ask: Callable[[Any], Pulse]) -> Pulse:
        return ask(self)

    def lookupByUUIDString(self, _uuid: str) -> None:
        raise Refused(self._code)


async def test_only_a_guest_that_libvirt_does_not_know_is_gone() -> None:
    gone = cast("Hypervisor", Answers(libvirt.VIR_ERR_NO_DOMAIN))
    assert (await sample_liveness(gone, "u", Seconds(1.0))).state is None
    for code in (0, libvirt.VIR_ERR_RPC):
        with pytest.raises(libvirt.libvirtError):
            await sample_liveness(cast("Hypervisor", Answers(code)), "u", Seconds(1.0))
