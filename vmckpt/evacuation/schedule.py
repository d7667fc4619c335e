"""Choose the moves that begin next, each time a move has ended. Pure.

The window slides, so no move waits for a batch. A move begins if its source, its target and the
run are below their limits, its target has room in addition to all incoming migrations, and starting
now finishes sooner than waiting. While a move of a host is about to end, one more move may begin
its setup there; otherwise the network would be idle during the setup.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from vmckpt.evacuation.bandwidth import Move, Under, alone, begin, pays
from vmckpt.evacuation.plan.capacity import CapacityModel
from vmckpt.evacuation.plan.fleet import Fleet
from vmckpt.evacuation.plan.placement import cheapest
from vmckpt.policy.model import Order
from vmckpt.units import BytesPerSecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Limits on the number of concurrent moves."""

    per_source: int = 2
    """Moves off each host; one more is allowed while one of them is about to end."""
    per_target: int = 2
    """Moves to each host; one more is allowed while one of them is about to end."""
    total: int = 16
    order: Order = Order.LONGEST


def start(
    capacity: CapacityModel, waiting: Sequence[Move], running: Sequence[Under],
    links: Mapping[str, BytesPerSecond], windows: Windows, *,
    changed: Container[str] | None = None,
) -> list[Move]:  # fmt: skip
    """Choose the moves that begin now, and place their guests on the targets in `capacity`.

    `capacity`: counts each guest on its host, and a moving guest also on its target. `changed`:
    only moves from or to these hosts are considered; None: all moves.
    """
    under = list(running)
    begun: list[Move] = []
    sources = _Places(windows.per_source, [(one.move.source, one.ending) for one in under])
    targets = _Places(windows.per_target, [(one.move.target, one.ending) for one in under])
    for move in ordered(waiting, windows.order, links):
        if len(under) >= windows.total:
            break
        if changed is not None and move.source not in changed and move.target not in changed:
            continue
        if not (sources.free(move.source) and targets.free(move.target)):
            continue
        at = capacity.index[move.target]
        if capacity.reasons_against(move.tenant, at) is not None or not pays(move, under, links):
            continue
        capacity.place(move.tenant, at)
        under.append(begin(move))
        begun.append(move)
        sources.take(move.source)
        targets.take(move.target)
    return begun


class _Places:
    """The number of moves of each host, compared with a limit."""

    def __init__(self, most: int, taken: Iterable[tuple[str, bool]]) -> None:
        """`taken`: the host of each running move, and whether that move is ending."""
        self._most = most
        self._all, self._busy = Counter[str](), Counter[str]()
        for host, ending in taken:
            self._all[host] += 1
            self._busy[host] += not ending

    def free(self, host: str) -> bool:
        return self._busy[host] < self._most and self._all[host] <= self._most

    def take(self, host: str) -> None:
        self._all[host] += 1
        self._busy[host] += 1


def ordered(
    waiting: Sequence[Move], order: Order, links: Mapping[str, BytesPerSecond]
) -> list[Move]:
    """Return the moves sorted by priority, then by `order`."""

    def key(move: Move) -> tuple[int, float, str]:
        size = {
            Order.SMALLEST: float(move.tenant.travels),
            Order.LONGEST: -move.tenant.travels / alone(move, links),
            Order.NAME: 0.0,
        }[order]
        return (-move.tenant.priority, size, move.name)

    return sorted(waiting, key=key)


def detour(capacity: CapacityModel, waiting: Sequence[Move]) -> Move | None:
    """Find a temporary move that lets another move begin when no move is running or can begin.

    Returns the move of the smallest suitable guest; None if no single move helps. `capacity` is
    unchanged afterwards.
    """
    for move in sorted(waiting, key=lambda one: (one.tenant.memory, one.name)):
        tenant = move.tenant
        aside = cheapest(capacity, tenant, never=capacity.index[move.target])
        if aside is None:
            continue
        at = capacity.index[move.source]
        capacity.remove(tenant, at)
        capacity.place(tenant, aside)
        helps = any(
            other is not move
            and capacity.reasons_against(other.tenant, capacity.index[other.target]) is None
            for other in waiting
        )
        capacity.remove(tenant, aside)
        capacity.place(tenant, at)
        if helps:
            return Move(tenant=tenant, source=move.source, target=capacity.places[aside].name)
    return None


def links_of(fleet: Fleet) -> dict[str, BytesPerSecond]:
    """Return the bandwidth of each host's network."""
    return {one.name: one.link for one in fleet.places}
