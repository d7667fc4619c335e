"""A cut through several guests: who is waited for, who is late, what a group is worth. Pure.

All stop, all are captured, all go on. A guest goes on to the next phase when all have reached this
one; if one fails or is late in one, all are let go and nothing of the group is published.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from vmckpt.errors import BadInput
from vmckpt.model.events import Copied
from vmckpt.model.recovery import Phase
from vmckpt.store.format.metadata import Public
from vmckpt.units import Bytes, Seconds

LIMITS: Mapping[Phase, Seconds | None] = {
    Phase.READY: Seconds(60.0),
    Phase.STOPPED: Seconds(5.0),
    Phase.CAPTURED: Seconds(5.0),
    Phase.STORED: None,
}
"""How long the first waits for the last. While they stand still or their output is held, less than
an agent waits (agent.snapshot.create) and output is held at the most (capture.network_hold); nobody
is harmed by one that takes long to store."""
SIZE = "group-size"
"""The tag that says how many snapshots a whole group has."""
_ID = re.compile(r"g-[a-z2-7]{16}")
_PHASES = ("capture", "store")
_NEXT = {
    Phase.READY: Phase.STOPPED,
    Phase.STOPPED: Phase.CAPTURED,
    Phase.CAPTURED: Phase.STORED,
    Phase.STORED: None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The phase that is waited for, and who has reached it."""

    members: frozenset[str]
    phase: Phase | None = Phase.READY
    """None: all have reached the last."""
    since: float
    """When the one before was reached by all."""
    here: frozenset[str] = frozenset()


def arrived(meeting: Meeting, member: str, phase: Phase, now: float) -> Meeting:
    """One has reached a phase. Raises ValueError if nobody waits for it there."""
    if member not in meeting.members or phase is not meeting.phase or member in meeting.here:
        raise ValueError(f"{member} says {phase} while {meeting.phase} is waited for")
    here = meeting.here | {member}
    if here == meeting.members:
        return replace(meeting, phase=_NEXT[phase], since=now, here=frozenset())
    return replace(meeting, here=here)


def time_left(meeting: Meeting, now: float) -> Seconds | None:
    """How long the others are waited for yet; None: as long as it takes."""
    limit = None if meeting.phase is None else LIMITS[meeting.phase]
    return None if limit is None else Seconds(max(0.0, meeting.since + limit - now))


def late(meeting: Meeting, now: float) -> tuple[str, ...]:
    """Who has let the others wait too long."""
    if time_left(meeting, now) != 0.0:
        return ()
    return tuple(sorted(meeting.members - meeting.here))


def together(progress: Sequence[Copied]) -> Copied:
    """How far several are, as one: those that are still in the phase that comes first."""
    phase = min((one.phase for one in progress), key=_rank)
    those = [one for one in progress if one.phase == phase]
    totals = [one.total for one in those if one.total is not None]
    return Copied(
        phase=phase,
        done=Bytes(sum(one.done for one in those)),
        total=Bytes(sum(totals)) if len(totals) == len(those) else None,
        new=Bytes(sum(one.new for one in those)),
    )


def _rank(phase: str) -> int:
    return _PHASES.index(phase) if phase in _PHASES else len(_PHASES)


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """The guests of a group as an operator names them. Raises BadInput."""
    told = tuple(name.strip() for name in names)
    twice = [name for name, count in Counter(told).items() if count > 1]
    if twice:
        raise BadInput(f"--group names {twice[0]!r} twice")
    if len(told) < 2 or not all(told):
        raise BadInput("a group has at least two guests", hint="say --group web1,db1")
    return told


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCompleteness:
    """What is there of a group."""

    id: str
    there: int
    size: int

    @property
    def whole(self) -> bool:
        return self.there == self.size

    def __str__(self) -> str:
        if self.whole:
            return f"{self.id}, {self.size} guests"
        return f"{self.id} is incomplete: {self.there} of {self.size}"


def is_id(word: str) -> bool:
    """Whether this is what groups are called by, and no snapshot."""
    return _ID.fullmatch(word) is not None


def standing(publics: Iterable[Public]) -> dict[str, GroupCompleteness]:
    """What is there of each group.

    A group counts only if all of it is there: this is told by what is in the store and nothing
    else, so no crash leaves a record that is wrong. What is left of another is a good snapshot of
    its guest.
    """
    there: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for one in publics:
        if one.group is not None:
            there[one.group] += 1
            size = one.tags.get(SIZE, "")
            sizes[one.group] = int(size) if size.isascii() and size.isdigit() else 0
    return {id_: GroupCompleteness(id=id_, there=n, size=sizes[id_]) for id_, n in there.items()}
