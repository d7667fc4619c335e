"""Measure what a forecast needs, on both hosts concurrently. A failed measurement is not an error.

An agent on the source counts the pages that the guest writes. At the same time, pages are sampled:
the samples show how much memory is in use, and replace the counts where writes cannot be tracked.

The first measurement takes about a second. The guest may write so much that a longer measurement
would change the forecast. Its writes are then measured again, for at most the duration of the first
pass.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

from vmckpt.errors import VmckptError
from vmckpt.hypervisor import dirty_rate
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.journal.migration_history import PastMove
from vmckpt.migration.forecast import history, tracked_writes
from vmckpt.migration.forecast.dirty_curve import saturates
from vmckpt.migration.forecast.forecast import Facts, Range
from vmckpt.migration.plan.host_facts import Remotes
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.model.migration import DirtyPoint, LinkSeen, MemorySeen
from vmckpt.policy.model import Policy, Tls
from vmckpt.remote import measure as remote
from vmckpt.remote.ssh import Remote
from vmckpt.units import MIB, Seconds, show_bytes, show_rate, show_seconds

T = TypeVar("T")

_FIRST = (0.1, 0.25, 0.5, 1.0)
# When a longer measurement is read, as fractions of its duration.
_LONGER = (0.12, 0.25, 0.45, 0.7, 1.0)
_SOON, _TRACKING_LIMIT = Seconds(1.1), Seconds(2.0)
"""Duration of a count of written pages, about as long as sampling takes; and the time limit for the
agent's answer.
"""
_COUNTED, _SAMPLES = "counted by write tracking", "from sampled pages"
# If less than this share of the memory in use can change in the first pass, one second of
# measurement is enough.
_MATTERS = 0.15
_LINK_LIMIT, _MEMORY_LIMIT, _LATE = Seconds(8.0), Seconds(12.0), Seconds(12.0)
# Counts by libvirt and the kernel include zero pages. Measured: 83 to 97 % are in use.
_RESIDENT = (0.7, 1.0)
_PROCESS = (0.4, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    in_use: Range
    tail: tuple[tuple[float, float], ...]
    dirty: tuple[DirtyPoint, ...]
    basis: tuple[str, ...]
    sampled: bool
    """Whether the guest's pages could be sampled, and can therefore be sampled again."""
    tracked: bool = False
    """Whether the guest's writes could be tracked, and can therefore be tracked again."""


class Links:
    """Bandwidths between hosts. Each pair of source and target is measured once.

    No host takes part in two measurements at once: each would see only half of the bandwidth.
    """

    def __init__(self) -> None:
        self._pairs: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._hosts: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._seen: dict[tuple[str, str], tuple[LinkSeen | None, str | None]] = {}

    async def between(
        self, source: Host, target: Host, remotes: Remotes | None
    ) -> tuple[LinkSeen | None, str | None]:
        """Return the bandwidth between two hosts, or the reason why the measurement failed.

        Both are None if there are no ssh logins, or if the target has no address for its peers.
        """
        pair = source.name, target.name
        async with self._pairs[pair], AsyncExitStack() as held:
            if pair not in self._seen:
                for name in sorted({*pair}):  # sorted, so that two callers cannot deadlock
                    await held.enter_async_context(self._hosts[name])
                self._seen[pair] = await _try(_link(remotes, target), _LINK_LIMIT)
        return self._seen[pair]


async def measure(
    source: Hypervisor,
    target: Hypervisor,
    guest: Guest,
    policy: Policy,
    past: Sequence[PastMove],
    *,
    probe: Seconds,
    remotes: Remotes | None,
    links: Links | None = None,
) -> Facts:
    """Measure the facts of a forecast.

    A fact that could not be measured becomes a wider range, with the reason in `basis`.

    `probe`: how long the guest's writes may be measured; 0: not at all. `past`: moves between
    these hosts, latest first. `remotes`: ssh logins to both hosts; None: libvirt measures the
    guest, and the link is not measured. `links`: link measurements that are shared with other
    calls.
    """
    (link, link_error), memory = await asyncio.gather(
        (links or Links()).between(source.host, target.host, remotes),
        _memory(source, guest, remotes, probe),
    )
    how = policy.transport
    carried = history.bandwidth(
        link, past, encrypted=how.tls is Tls.REQUIRED, connections=how.connections
    )
    setup, setup_words = history.setup(past)
    facts = Facts(
        memory=guest.memory,
        in_use=memory.in_use,
        dirty=memory.dirty,
        bandwidth=carried.first,
        later=carried.later,
        setup=setup,
        stop=history.STOP,
        tail=memory.tail,
        link=link,
        known=carried.known or _limited_by(policy.limits.bandwidth, carried.first),
        basis=(
            *memory.basis,
            *((f"link not measured: {link_error}",) if link_error else ()),
            *carried.basis,
            setup_words,
        ),
    )
    longer = worthwhile_probe(facts, policy, probe)
    if longer is None:
        return facts
    if memory.tracked and remotes is not None:
        return await _track_longer(facts, remotes[0], guest, longer)
    return await _look_longer(facts, source, guest, remotes if memory.sampled else None, longer)


def _limited_by(limit: float | None, stream: Range) -> bool:
    """Return whether `limit` is at most the lowest expected bandwidth; None: no limit. Pure."""
    return limit is not None and limit <= stream.low


def worthwhile_probe(facts: Facts, policy: Policy, probe: Seconds) -> Seconds | None:
    """Return how long a second measurement should take; None if it is not worthwhile. Pure.

    A second measurement is worthwhile if the guest may dirty much more memory during the first
    pass than was measured. It takes at most as long as the first pass, and at most `probe`.
    """
    bandwidth = facts.bandwidth.at_most(policy.limits.bandwidth).middle
    first = facts.in_use.middle / bandwidth
    known = max((one.time for one in facts.dirty), default=0.0)
    longer = min(float(probe), first)
    if not facts.dirty or longer < 1.5 * max(known, _FIRST[-1]):
        return None
    if saturates([(one.time, one.dirtied) for one in facts.dirty]):
        return None
    most = facts.curve(1.0)
    if most.within(first) - most.within(known) < _MATTERS * facts.in_use.middle:
        return None
    return Seconds(longer)


async def _try(call: Awaitable[T], limit: Seconds) -> tuple[T | None, str | None]:
    """Return the result of a call, or the reason why it failed."""
    try:
        async with asyncio.timeout(limit):
            return await call, None
    except TimeoutError:
        return None, f"no answer within {show_seconds(limit)}"
    except VmckptError as exc:
        return None, str(exc)


async def _link(remotes: Remotes | None, target: Host) -> LinkSeen | None:
    address = target.address_for_peers
    if remotes is None or address is None:
        return None
    return await remote.link(*remotes, address)


async def _memory(
    source: Hypervisor, guest: Guest, remotes: Remotes | None, probe: Seconds
) -> _Memory:
    """Measure memory by tracking writes and sampling pages.

    If sampling fails, use counts of the kernel and libvirt.
    """
    error: str | None = "ssh logins to both hosts are required"
    counted: tuple[DirtyPoint, ...] | None = None
    if remotes is not None:
        times = [one for one in _FIRST if one <= probe]
        (seen, error), (counted, why) = await asyncio.gather(
            _try(remote.memory(remotes[0], guest, times), _MEMORY_LIMIT),
            _try(_tracked(remotes[0], guest, times), _TRACKING_LIMIT),
        )
        if seen is not None:
            known = _sampled(seen)
            if counted:
                basis = (known.basis[0], *_written(counted, _COUNTED))
                return replace(known, dirty=counted, basis=basis, tracked=True)
            untracked = (f"writes not tracked: {why}",) if times else ()
            return replace(known, basis=(*known.basis, *untracked))
    reason = f"pages of {guest.name} were not sampled: {error}"
    if counted:
        in_use, words = await _counted(source, guest, remotes)
        return _Memory(
            in_use=in_use, tail=(), dirty=counted, sampled=False, tracked=True,
            basis=(reason, words, *_written(counted, _COUNTED)),
        )  # fmt: skip
    (in_use, words), (dirty, dirty_words) = await asyncio.gather(
        _counted(source, guest, remotes), _rated(source, guest, probe)
    )
    return _Memory(
        in_use=in_use, tail=(), dirty=dirty, basis=(reason, words, dirty_words), sampled=False
    )


async def _tracked(source: Remote, guest: Guest, times: Sequence[float]) -> tuple[DirtyPoint, ...]:
    return await tracked_writes.count(source, guest, times, _SOON) if times else ()


def _sampled(seen: MemorySeen) -> _Memory:
    low = max(0.0, seen.in_use - seen.error)
    # A page takes eight bytes more than its content, a zero page nine (ram.c, save_zero_page).
    extra = 9 / 4096 * seen.size
    # Firmware, tables and device state are sent, too, and are not among the sampled pages.
    return _Memory(
        in_use=Range(low + extra, min(float(seen.size), seen.in_use + seen.error) + extra + MIB),
        tail=seen.tail,
        dirty=seen.dirtied,
        basis=(
            f"{show_bytes(seen.in_use)} of {show_bytes(seen.size)} in use,"
            f" from {seen.samples} sampled pages",
            *_written(seen.dirtied, _SAMPLES),
        ),
        sampled=True,
    )


def _written(dirty: Sequence[DirtyPoint], how: str) -> tuple[str, ...]:
    if not dirty:
        return ()
    last = max(dirty, key=lambda one: one.time)
    return (
        f"{show_bytes(last.dirtied)} written within {show_seconds(last.time)}"
        f" ({show_rate(last.dirtied / last.time)}), {how}",
    )


async def _counted(source: Hypervisor, guest: Guest, remotes: Remotes | None) -> tuple[Range, str]:
    """Return the bytes of memory in use from coarser counts, and their basis in words."""
    if remotes is not None:
        held, _ = await _try(remote.resident(remotes[0], guest), _MEMORY_LIMIT)
        if held is not None:
            span = Range(_RESIDENT[0] * held, _RESIDENT[1] * held)
            return span, f"{show_bytes(held)} resident, as counted by the kernel"
    process, _ = await _try(dirty_rate.resident(source, guest), _MEMORY_LIMIT)
    if process is not None:
        span = Range(_PROCESS[0] * process, _PROCESS[1] * process)
        return span, f"QEMU's process uses {show_bytes(process)}, as reported by libvirt"
    return Range(0.05 * guest.memory, float(guest.memory)), "memory in use is unknown"


async def _rated(
    source: Hypervisor, guest: Guest, probe: Seconds
) -> tuple[tuple[DirtyPoint, ...], str]:
    """Return the dirtying curve from libvirt, and its basis in words.

    The curve has one point, measured over one second; none if `probe` is shorter, or libvirt fails.
    """
    if probe < 1.0:
        return (), "writes not measured"
    point, error = await _try(dirty_rate.dirtied(source, guest, 1), Seconds(1.0 + _LATE))
    if point is None:
        return (), f"writes not measured: {error}"
    return (point,), f"{show_rate(point.dirtied / point.time)} written, as sampled by libvirt"


async def _look_longer(
    facts: Facts, source: Hypervisor, guest: Guest, remotes: Remotes | None, longer: Seconds
) -> Facts:
    """Return the facts with a second, longer measurement of the guest's writes.

    Without `remotes`, libvirt measures, if `longer` is at least 2 s. If the measurement fails, only
    `basis` changes.
    """
    found: tuple[DirtyPoint, ...] = ()
    if remotes is not None:
        known = max(one.time for one in facts.dirty)
        times = [share * longer for share in _LONGER if share * longer > 1.2 * known]
        limit = Seconds(longer + _LATE)
        seen, error = await _try(remote.memory(remotes[0], guest, times), limit)
        found = () if seen is None else seen.dirtied
    elif longer >= 2:
        whole = int(longer)
        limit = Seconds(whole + _LATE)
        point, error = await _try(dirty_rate.dirtied(source, guest, whole), limit)
        found = () if point is None else (point,)
    else:
        return facts
    if not found:
        words = f"second measurement of writes failed: {error}"
        return replace(facts, basis=(*facts.basis, words))
    basis = _written(found, _SAMPLES if remotes is not None else "as sampled by libvirt")
    return replace(facts, dirty=(*facts.dirty, *found), basis=(*facts.basis, *basis))


async def _track_longer(facts: Facts, source: Remote, guest: Guest, longer: Seconds) -> Facts:
    """Return the facts with a second, longer count of the pages that the guest writes.

    If the count fails, only `basis` changes.
    """
    times = [share * longer for share in _LONGER]
    limit = Seconds(longer + _LATE)
    found, error = await _try(tracked_writes.count(source, guest, times, limit), limit)
    if not found:
        words = f"second measurement of writes failed: {error}"
        return replace(facts, basis=(*facts.basis, words))
    # Both counts are exact, so a later one of about the same time adds nothing.
    last = max(one.time for one in facts.dirty)
    more = tuple(one for one in found if one.time > last)
    basis = _written(more, _COUNTED)
    return replace(facts, dirty=(*facts.dirty, *more), basis=(*facts.basis, *basis))
