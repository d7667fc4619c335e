"""The filters at a guest's network cards: their names, their order, and QEMU's timer. Pure.

From the guest to the wire a packet meets the counter, `collecting`, `holding` and the sink. QEMU
empties a `filter-buffer` when its interval has passed, in the guest's own time, and nothing sets
that timer anew but to empty it. So another buffer takes its place in time, between it and the wire;
the place is numbered, and of two buffers of one kind the one with the higher number is nearer to
the wire.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from vmckpt.units import Seconds

LONGEST = Seconds((2**32 - 1) / 1e6)
"""The longest interval that QEMU takes: 71.6 minutes."""
_SHARE = 8
"""A buffer is replaced after this part of its interval."""


class Kind(StrEnum):
    """What a filter does."""

    COUNT = "count"
    """Writes one record per packet to a file."""
    COLLECTING = "collecting"
    """Keeps the output of the open epoch while that of a closed one waits."""
    HOLDING = "holding"
    """Keeps the output that waits for its epoch."""
    SINK = "sink"
    """Discards what reaches it: what leaves `holding` by the timer and not by a release."""


_ORDER = (Kind.SINK, Kind.COUNT, Kind.COLLECTING, Kind.HOLDING)
_NAME = re.compile(rf"vmckpt-({'|'.join(Kind)})(\d*)-(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Filter:
    """One filter at one card."""

    kind: Kind
    card: str
    """libvirt's alias: "net0"."""
    place: int = 0
    """How many there were before it."""

    @property
    def name(self) -> str:
        """Its object ID in QEMU."""
        return f"vmckpt-{self.kind}{self.place or ''}-{self.card}"

    @property
    def next(self) -> Self:
        """The one that replaces it."""
        return type(self)(self.kind, self.card, self.place + 1)


def found(names: Iterable[str], gone: Collection[str] = ()) -> list[Filter]:
    """Find ours among QEMU's objects, in the order in which they can be removed.

    The sink is first, so that nothing is lost; then each empties itself into the next. Of `gone`
    cards it is last: packets of a card that QEMU has freed must not get beyond it.
    """
    matches = (_NAME.fullmatch(name) for name in names)
    ours = (Filter(Kind(one[1]), one[3], int(one[2] or 0)) for one in matches if one)

    def order(one: Filter) -> tuple[bool, int, int, str]:
        late = one.kind is Kind.SINK and one.card in gone
        return late, _ORDER.index(one.kind), one.place, one.card

    return sorted(ours, key=order)


def last(filters: Iterable[Filter]) -> dict[tuple[Kind, str], Filter]:
    """The filter nearest to the wire, of each kind at each card."""
    return {(one.kind, one.card): one for one in sorted(filters, key=lambda one: one.place)}


def due(armed: float, now: float, interval: Seconds) -> bool:
    """Whether a buffer that was armed then is to be replaced."""
    return now - armed >= interval / _SHARE


def may_have_fired(armed: float, now: float, interval: Seconds) -> bool:
    """Whether QEMU may have emptied the buffer by its timer.

    The guest's time, by which the timer goes, never runs ahead of the host's.
    """
    return now - armed >= interval
