import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from tests.lab.bench import Bench
from tests.support.worlds import policy
from vmckpt.errors import RemoteError
from vmckpt.hypervisor import dirty_rate
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.domains import find_guest
from vmckpt.migration.forecast import tracked_writes
from vmckpt.migration.forecast.forecast import Facts
from vmckpt.migration.forecast.measure import measure
from vmckpt.model.guest import Guest
from vmckpt.model.migration import DirtyPoint
from vmckpt.remote import measure as remote
from vmckpt.remote.ssh import Remote
from vmckpt.units import MIB, Seconds, parse_rate
from vmckpt_lab import network

T = TypeVar("T")
Question = Callable[[Hypervisor, Remote, Guest], Awaitable[T]]


def asked(bench: Bench, question: Question[T]) -> T:
    """One question about web1 to alpha, with a login there."""

    async def ask() -> T:
        host = bench.inventory.host("alpha")
        async with Hypervisor(host) as hypervisor, Remote(host) as here:
            guest = await find_guest(hypervisor, "web1")
            assert guest is not None
            return await question(hypervisor, here, guest)

    return asyncio.run(ask())


class Writes:
    """How fast a guest writes from now on. It is told 20 MiB/s, for which it needs a core."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._began = bench.seen()

    def rate(self) -> float:
        """Bytes a second until now."""
        now = self._bench.seen()
        pages = now.pages_written - self._began.pages_written
        return pages * 4096 / (now.now - self._began.now)


def test_what_is_measured_is_what_the_guest_and_the_link_do(bench: Bench) -> None:
    bench.guest(memory="256MiB", dirty="64MiB@20MiB/s")
    for host in ("alpha", "beta"):
        network.shape(bench.plan, host, parse_rate("100mbit"))

    async def look(source: Hypervisor, here: Remote, guest: Guest) -> Facts:
        beta = bench.inventory.host("beta")
        async with Hypervisor(beta) as target, Remote(beta) as there:
            return await measure(
                source, target, guest, policy(), [], probe=Seconds(4.0), remotes=(here, there)
            )

    try:
        writes = Writes(bench)
        known = asked(bench, look)
        written = writes.rate()
    finally:
        for host in ("alpha", "beta"):
            network.shape(bench.plan, host, None)

    # 100 Mbit/s less the headers: four times that was lost in part to other work on these cores;
    # the region and a kernel; what the guest wrote, up to 64 MiB.
    assert known.bandwidth.middle == pytest.approx(11.4 * MIB, rel=0.08)
    assert known.bandwidth.width < 0.1
    assert 100 * MIB < known.in_use.low < known.in_use.high < 160 * MIB
    at_once = next(one for one in known.dirty if 0.8 < one.time < 1.3)
    assert at_once.dirtied / at_once.time == pytest.approx(written, rel=0.25)
    assert max(one.time for one in known.dirty) > 2
    assert all(one.dirtied < 75 * MIB for one in known.dirty)
    assert ":4921" not in bench.inside("beta", "ss", "-ltn")


def test_an_agent_counts_the_pages_that_a_guest_writes(bench: Bench) -> None:
    bench.guest(memory="256MiB", dirty="64MiB@20MiB/s")

    async def count(_source: Hypervisor, here: Remote, guest: Guest) -> tuple[DirtyPoint, ...]:
        return await tracked_writes.count(here, guest, [0.3, 1.0, 2.0], Seconds(60.0))

    writes = Writes(bench)
    counted = asked(bench, count)
    written = writes.rate()

    assert [round(one.time) for one in counted] == [0, 1, 2]
    rising = [one.dirtied for one in counted]
    assert rising == sorted(rising)
    # Each page of the region once, and what the kernel and the ledgers of the guest write.
    assert written < counted[-1].dirtied / counted[-1].time < 1.6 * written + 4 * MIB
    assert counted[-1].dirtied < 75 * MIB


def test_libvirt_and_the_kernel_tell_less_but_not_something_else(bench: Bench) -> None:
    bench.guest(memory="256MiB", dirty="64MiB@20MiB/s")

    async def rated(source: Hypervisor, _here: Remote, guest: Guest) -> DirtyPoint:
        return await dirty_rate.dirtied(source, guest, 2)

    async def held(source: Hypervisor, here: Remote, guest: Guest) -> tuple[int, int | None]:
        return await remote.resident(here, guest), await dirty_rate.resident(source, guest)

    writes = Writes(bench)
    point = asked(bench, rated)
    written = writes.rate()
    kernel, process = asked(bench, held)

    assert abs(point.dirtied - 2 * written) < 1.5 * point.error
    assert 100 * MIB < kernel < 256 * MIB
    assert process is not None
    assert process >= kernel


def test_a_guest_of_another_name_is_not_looked_at(bench: Bench) -> None:
    bench.guest(memory="192MiB", dirty="16MiB@1MiB/s")

    async def look(_source: Hypervisor, here: Remote, guest: Guest) -> None:
        await remote.memory(here, replace(guest, uuid="no-such-uuid"), [])

    with pytest.raises(RemoteError, match="is not the guest's QEMU"):
        asked(bench, look)
