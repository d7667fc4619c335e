"""Rules of a group snapshot: the phases of its guests, late guests, completeness. Pure.

All guests are paused, then all are captured, then all resume. A guest enters the next phase when
all guests have reached the current phase. If a guest fails or is late, all guests resume and no
snapshot of the group is published.
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
"""How long the first guest waits for the last guest. While guests are paused or their output is
buffered, the limit is below an agent's own limit (agent.snapshot.create) and the limit for buffered
output (capture.network_hold). Storing may take any time, as the guests run meanwhile."""
SIZE = "group-size"
"""The tag with the number of snapshots in the complete group."""
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
    """The phase that a group waits for, and the members that have reached it."""

    members: frozenset[str]
    phase: Phase | None = Phase.READY
    """The phase that is awaited; None: all members have reached the last phase."""
    since: float
    """When all members had reached the previous phase."""
    here: frozenset[str] = frozenset()


def arrived(meeting: Meeting, member: str, phase: Phase, now: float) -> Meeting:
    """Record that a member has reached a phase. Returns the new state.

    `now`: in monotonic seconds, here and in the functions below. Raises ValueError if the member or
    phase is not expected now.
    """
    if member not in meeting.members or phase is not meeting.phase or member in meeting.here:
        raise ValueError(f"{member} reports {phase} while the group waits for {meeting.phase}")
    here = meeting.here | {member}
    if here == meeting.members:
        return replace(meeting, phase=_NEXT[phase], since=now, here=frozenset())
    return replace(meeting, here=here)


def time_left(meeting: Meeting, now: float) -> Seconds | None:
    """Return how long the group still waits for the phase; None: without limit."""
    limit = None if meeting.phase is None else LIMITS[meeting.phase]
    return None if limit is None else Seconds(max(0.0, meeting.since + limit - now))


def late(meeting: Meeting, now: float) -> tuple[str, ...]:
    """Return the members that have not reached the phase in time."""
    if time_left(meeting, now) != 0.0:
        return ()
    return tuple(sorted(meeting.members - meeting.here))


def together(progress: Sequence[Copied]) -> Copied:
    """Combine the progress of several members: the sum over the members in the earliest phase."""
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
    """Return the names of a group's guests, stripped. Raises BadInput if they are invalid."""
    told = tuple(name.strip() for name in names)
    twice = [name for name, count in Counter(told).items() if count > 1]
    if twice:
        raise BadInput(f"--group names {twice[0]!r} twice")
    if len(told) < 2 or not all(told):
        raise BadInput("a group needs at least two guests", hint="use --group web1,db1")
    return told


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCompleteness:
    """How many snapshots of a group exist."""

    id: str
    there: int
    size: int

    @property
    def whole(self) -> bool:
        return self.there == self.size

    def __str__(self) -> str:
        if self.whole:
            return f"{self.id}, {self.size} guests"
        return f"{self.id} is incomplete: {self.there} of {self.size} guests"


def is_id(word: str) -> bool:
    """Return whether a word is a group ID."""
    return _ID.fullmatch(word) is not None


def standing(publics: Iterable[Public]) -> dict[str, GroupCompleteness]:
    """Return the completeness of each group among these snapshots.

    Completeness is derived only from the snapshots in the store, so no crash can leave a wrong
    record. The snapshots of an incomplete group are still good snapshots of their guests.
    """
    there: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for one in publics:
        if one.group is not None:
            there[one.group] += 1
            size = one.tags.get(SIZE, "")
            sizes[one.group] = int(size) if size.isascii() and size.isdigit() else 0
    return {id_: GroupCompleteness(id=id_, there=n, size=sizes[id_]) for id_, n in there.items()}
