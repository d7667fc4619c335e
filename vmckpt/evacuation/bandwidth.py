"""How moves share a network, and how long they take with what they get of it. Pure.

A fluid model: bandwidth is shared fairly at both ends of each move (max-min fairness, Bertsekas and
Gallager, Data Networks, 1992, section 6.5.2), and what a guest writes meanwhile must travel again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vmckpt.evacuation.plan.fleet import Tenant
from vmckpt.model.migration import JobPhase, JobSample
from vmckpt.units import BytesPerSecond, Seconds

SETUP = Seconds(1.5)
"""Looking, listening and the switchover, whatever the size."""
_KEEPS = 0.95
_MUCH_MORE = 1.25
_ROOM = 2.0
"""Times its dirty rate that a guest must get to be slowed down for another."""
_LEAST_GAIN = 0.1
"""A guest that writes faster than that leaves of its share is ended by post-copy, or slowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One guest from one host to another."""

    tenant: Tenant
    source: str
    target: str

    @property
    def name(self) -> str:
        return self.tenant.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Under:
    """A move on its way."""

    move: Move
    setup: Seconds = SETUP
    """What is left of it."""
    left: float = 0.0
    """Bytes."""
    ending: bool = False
    """What is left takes no longer than the setup of another, which may begin now."""
    shared: bool = False
    """Another one used its links, too."""


def begin(move: Move) -> Under:
    """It starts now."""
    return Under(move=move, left=float(move.tenant.travels))


def shares(running: Sequence[Under], links: Mapping[str, BytesPerSecond]) -> dict[str, float]:
    """Bytes per second of each by its guest's name; those in their setup take none."""
    sending = [one.move for one in running if one.setup <= 0]
    ends = {
        move.name: ((">", move.source), ("<", move.target), ("=", move.name)) for move in sending
    }
    own = {move.name: _most(move) for move in sending}
    users: dict[tuple[str, str], set[str]] = {}
    for name, both in ends.items():
        for end in both:
            users.setdefault(end, set()).add(name)
    room = {end: own[end[1]] if end[0] == "=" else float(links[end[1]]) for end in users}
    found: dict[str, float] = {}
    while users:
        tightest = min(users, key=lambda end: room[end] / len(users[end]))
        rate = room[tightest] / len(users[tightest])
        for name in users.pop(tightest):
            found[name] = rate
            for end in ends[name]:
                if end in users:
                    users[end].discard(name)
                    room[end] -= rate
                    if not users[end]:
                        del users[end]
    return found


def gain(under: Under, rate: float) -> float:
    """Bytes by which less is left each second."""
    return max(rate - under.move.tenant.dirty, rate * _LEAST_GAIN)


def advance(
    running: Sequence[Under], links: Mapping[str, BytesPerSecond]
) -> tuple[Seconds, list[Under]]:
    """Until the next one ends, is about to end, or is through with its setup: how long that takes,
    and what is under way then; one that has ended has nothing left."""
    rates = shares(running, links)
    turns = [_turn(one, rates) for one in running]
    step = Seconds(min(turns))
    after = []
    for one, turn in zip(running, turns, strict=True):
        if one.setup > 0:
            after.append(replace(one, setup=Seconds(max(0.0, one.setup - step))))
        elif one.ending and turn <= step:
            after.append(replace(one, left=0.0))
        else:
            left = one.left - step * gain(one, rates[one.move.name])
            after.append(replace(one, left=left, ending=one.ending or turn <= step))
    return step, after


def _turn(under: Under, rates: Mapping[str, float]) -> float:
    """When something happens to it, from now."""
    if under.setup > 0:
        return under.setup
    rest = under.left / gain(under, rates[under.move.name])
    return rest if under.ending else max(0.0, rest - SETUP)


def over(under: Under) -> bool:
    """Whether it has ended."""
    return under.setup <= 0 and under.left <= 0


def _ends(move: Move) -> set[tuple[str, str]]:
    return {(">", move.source), ("<", move.target)}


def pays(candidate: Move, running: Sequence[Under], links: Mapping[str, BytesPerSecond]) -> bool:
    """Whether to begin now is better than to wait: those beside it keep what they have of the
    network, or are about to end; or they get enough, and it gets as much as it ever could, or all
    together much more than before.

    A link that is full carries no more for being shared, and a guest that writes much and gets
    little of it sends the same pages over and over. (Measured with bench/evacuation.py against the
    order in which everything starts at once: half the time.) But a narrow link at the other end
    that is idle meanwhile, or one that a single stream does not fill, is time lost.
    """
    busy = [replace(one, setup=Seconds(0.0)) for one in running if not one.ending]
    beside = [
        one.move.name for one in busy
        if one.move.source == candidate.source or one.move.target == candidate.target
    ]  # fmt: skip
    if not beside:
        return True
    # Only moves that share a link with one of those affect their rates.
    ends = {end for one in busy if one.move.name in beside for end in _ends(one.move)}
    busy = [one for one in busy if ends & _ends(one.move)]
    before = shares(busy, links)
    after = shares([*busy, replace(begin(candidate), setup=Seconds(0.0))], links)
    if all(after[name] >= _KEEPS * before[name] for name in beside):
        return True
    dirty = {one.move.name: one.move.tenant.dirty for one in busy}
    if any(after[name] < _ROOM * dirty[name] for name in beside):
        return False
    more = sum(after.values()) >= _MUCH_MORE * sum(before.values())
    return more or after[candidate.name] >= _KEEPS * alone(candidate, links)


def alone(move: Move, links: Mapping[str, BytesPerSecond]) -> float:
    """Bytes per second that it gets with nobody beside it."""
    return min(links[move.source], links[move.target], _most(move))


def _most(move: Move) -> float:
    return float("inf") if move.tenant.most is None else float(move.tenant.most)


_TELLING = Seconds(1.0)
"""QEMU tells what it has sent ten times a second, and libvirt is asked less often."""


class Streams:
    """By the names of their guests."""

    def __init__(self) -> None:
        self._first: dict[str, JobSample] = {}
        self._last: dict[str, JobSample] = {}

    def heard(self, name: str, sample: JobSample) -> None:
        """What counts is what is sent while the guest runs on the source."""
        if sample.phase is JobPhase.PRE_COPY and sample.iteration:
            self._first.setdefault(name, sample)
            self._last[name] = sample

    def ended(self, name: str) -> None:
        """However it did."""
        self._first.pop(name, None)
        self._last.pop(name, None)

    def carry(self) -> dict[str, BytesPerSecond]:
        """On average so far; without those that are too young to tell."""
        found = {}
        for name, last in self._last.items():
            first = self._first[name]
            lasted, sent = last.at - first.at, last.transferred - first.transferred
            if lasted >= _TELLING and sent > 0:
                found[name] = BytesPerSecond(round(sent / lasted))
        return found
