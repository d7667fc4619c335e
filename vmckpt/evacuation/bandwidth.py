"""Model how moves share a network, and how long each move takes with its share. Pure.

A fluid model: bandwidth is shared fairly at both ends of each move (max-min fairness, Bertsekas and
Gallager, Data Networks, 1992, section 6.5.2), and pages that the guest writes meanwhile are sent
again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vmckpt.evacuation.plan.fleet import Tenant
from vmckpt.model.migration import JobPhase, JobSample
from vmckpt.units import BytesPerSecond, Seconds

SETUP = Seconds(1.5)
"""Time for checks, connections and the switchover, for a guest of any size."""
_KEEPS = 0.95
_MUCH_MORE = 1.25
_ROOM = 2.0
"""A move may be slowed down for another move if its bandwidth stays at least this multiple of its
dirty rate."""
_LEAST_GAIN = 0.1
"""Minimum progress, as a fraction of the bandwidth: if the guest writes faster, post-copy or
throttling completes the move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The move of a guest from one host to another."""

    tenant: Tenant
    source: str
    target: str

    @property
    def name(self) -> str:
        return self.tenant.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Under:
    """A running move."""

    move: Move
    setup: Seconds = SETUP
    """Remaining time of its setup."""
    left: float = 0.0
    """Bytes that remain to be sent."""
    ending: bool = False
    """Whether sending the rest takes no longer than the setup of another move. If so, that move may
    begin."""
    shared: bool = False
    """Whether another move has used one of this move's links at the same time."""


def begin(move: Move) -> Under:
    """Return the initial state of a running move."""
    return Under(move=move, left=float(move.tenant.travels))


def shares(running: Sequence[Under], links: Mapping[str, BytesPerSecond]) -> dict[str, float]:
    """Return each move's bandwidth in bytes per second, by guest; moves in setup are omitted.

    `links`: bandwidth of each host's link, by host.
    """
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
    """Return how fast the remaining data of a move with bandwidth `rate` shrinks, in bytes/s."""
    return max(rate - under.move.tenant.dirty, rate * _LEAST_GAIN)


def advance(
    running: Sequence[Under], links: Mapping[str, BytesPerSecond]
) -> tuple[Seconds, list[Under]]:
    """Return the time until the next change, and the moves as they are then.

    A change is the end of a move, its last phase (`ending`), or the end of its setup. A move that
    has ended has no bytes left.
    """
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
    """Return the seconds until the next change of a move. `rates`: bytes per second, by guest."""
    if under.setup > 0:
        return under.setup
    rest = under.left / gain(under, rates[under.move.name])
    return rest if under.ending else max(0.0, rest - SETUP)


def over(under: Under) -> bool:
    """Return whether the move has ended."""
    return under.setup <= 0 and under.left <= 0


def _ends(move: Move) -> set[tuple[str, str]]:
    return {(">", move.source), ("<", move.target)}


def pays(candidate: Move, running: Sequence[Under], links: Mapping[str, BytesPerSecond]) -> bool:
    """Return whether it is better to begin a move now than to wait.

    It is better to begin if the moves on the same links keep their bandwidth or are about to end.
    It is also better if those moves keep enough bandwidth, and either the new move gets the full
    bandwidth of its links, or all moves together get much more than before.

    Sharing a full link does not make it faster, and a guest that writes a lot and gets little
    bandwidth sends the same pages again and again. (Measured with bench/plans.py: waiting
    takes half the time of starting all moves at once.) But waiting wastes bandwidth if a narrow
    link at the other end is idle, or if a single stream does not fill the link.
    """
    busy = [replace(one, setup=Seconds(0.0)) for one in running if not one.ending]
    beside = [
        one.move.name for one in busy
        if one.move.source == candidate.source or one.move.target == candidate.target
    ]  # fmt: skip
    if not beside:
        return True
    # Only moves that share a link with these affect their rates.
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
    """Return the bandwidth, in bytes per second, of a move without others on its links.

    `links`: see `shares`.
    """
    return min(links[move.source], links[move.target], _most(move))


def _most(move: Move) -> float:
    return float("inf") if move.tenant.most is None else float(move.tenant.most)


_TELLING = Seconds(1.0)
"""Minimum time between the first and last sample of a stream for its bandwidth to be meaningful:
QEMU updates its counters ten times a second, and libvirt is queried less often."""


class Streams:
    """The measured streams of running moves, by guest name."""

    def __init__(self) -> None:
        self._first: dict[str, JobSample] = {}
        self._last: dict[str, JobSample] = {}

    def heard(self, name: str, sample: JobSample) -> None:
        """Record a sample of a pre-copy pass; samples of other phases are ignored.

        `name`: the guest's name.
        """
        if sample.phase is JobPhase.PRE_COPY and sample.iteration:
            self._first.setdefault(name, sample)
            self._last[name] = sample

    def ended(self, name: str) -> None:
        """Forget a move that has ended, whatever its result."""
        self._first.pop(name, None)
        self._last.pop(name, None)

    def carry(self) -> dict[str, BytesPerSecond]:
        """Return each stream's average bandwidth, by guest name.

        Streams that were measured for less than a second, or have sent nothing since their first
        sample, are omitted.
        """
        found = {}
        for name, last in self._last.items():
            first = self._first[name]
            lasted, sent = last.at - first.at, last.transferred - first.transferred
            if lasted >= _TELLING and sent > 0:
                found[name] = BytesPerSecond(round(sent / lasted))
        return found
