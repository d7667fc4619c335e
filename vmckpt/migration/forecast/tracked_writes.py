"""Have the agent of a guest's host count the pages that the guest writes."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

from vmckpt.agent import client
from vmckpt.agent.orders import CountOrder
from vmckpt.model.events import Event
from vmckpt.model.guest import Guest
from vmckpt.model.migration import DirtyPoint
from vmckpt.remote.ssh import Remote
from vmckpt.units import Seconds


async def count(
    remote: Remote, guest: Guest, times: Sequence[float], within: Seconds
) -> tuple[DirtyPoint, ...]:
    """Return how many different bytes the guest writes within each of `times` (seconds).

    Uses only an agent that is installed; a forecast changes nothing on a host. The count ends about
    `within` after the call, even if the agent starts slowly; the later of `times` may then be
    missing. Raises VmckptError if the writes cannot be tracked; RemoteError if there is no agent,
    or if its answer is invalid.
    """
    host, stop = remote.host, asyncio.Event()
    timer = asyncio.get_running_loop().call_later(within, stop.set)
    try:
        order = CountOrder(guest=guest.uuid, uri=client.LIBVIRT, host=host.name, times=tuple(times))
        told = await client.run_order(
            host, order.as_json(), _ignore, stop, remote=remote, install=False
        )
    finally:
        timer.cancel()
    with client.sensible(host):
        return _parsed(told["points"], guest.memory)


def _ignore(_: Event) -> None:
    """Do nothing: the agent reports no progress."""


def _parsed(points: object, memory: int) -> tuple[DirtyPoint, ...]:
    """Parse an agent's counts. Raises ValueError or TypeError if they are invalid."""
    if not isinstance(points, list):
        raise TypeError(f"expected a list, not {str(points)[:40]!r}")
    found = [(float(at), float(written)) for at, written in points]
    times = [0.0, *(at for at, _ in found)]
    if not found or not all(a < b < 3600 for a, b in pairwise(times)):
        raise ValueError("expected ascending times below one hour")
    if not all(0 <= written < 2 * memory + (1 << 30) for _, written in found):
        raise ValueError("the counts are negative or exceed the guest's memory")
    return tuple(
        DirtyPoint(time=Seconds(at), dirtied=min(float(memory), written), error=0.0)
        for at, written in found
    )
