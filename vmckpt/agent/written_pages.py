"""Count the different pages that a guest writes within some seconds, for a forecast.

The guest is not paused while its pages are being write-protected. A page that is pinned for DMA at
that moment is counted later or not at all. That would be wrong for a copy of the memory, but it
does not matter for a forecast.
"""

import time
from collections.abc import Iterator, Sequence
from threading import Event
from typing import Any

from vmckpt.agent.orders import CountOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.capture.memory import page_runs, ram_blocks
from vmckpt.capture.memory.write_tracking import WriteTracking
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qmp import QmpMonitor

_AT_LEAST = 0.3
"""Seconds that a count takes at least, even if the controller asks to stop."""


def count(order: CountOrder, channel: ControllerChannel) -> dict[str, Any]:
    """Return "points": seconds, and bytes of the pages that were written within them.

    Raises CannotTrack, CannotCapture, HypervisorError, OSError.
    """
    with (
        QmpMonitor(order.guest, host=order.host, uri=order.uri) as monitor,
        identity.require(order.guest, monitor.name, order.host) as process,
    ):
        found = ram_blocks.find(monitor, process)
        ranges = [one.range for one in (*found.guest, *found.private)]
        with WriteTracking(process, ranges) as writes:
            writes.collect_all()
            return {"points": list(_points(writes, order.times, channel.stop))}


def _points(
    writes: WriteTracking, times: Sequence[float], stop: Event
) -> Iterator[tuple[float, int]]:
    """Yield the points, each at its time.

    Pages stay marked between the counts, so each count includes all pages written since the
    beginning.
    """
    began = time.monotonic()
    for at in times:
        stop.wait(max(0.0, began + at - time.monotonic()))
        time.sleep(max(0.0, began + min(at, _AT_LEAST) - time.monotonic()))
        counted = time.monotonic()
        pages = sum(page_runs.count(runs) for runs in writes.scan())
        yield (counted + time.monotonic()) / 2 - began, pages * PAGE
        if at >= _AT_LEAST and stop.is_set():
            return
