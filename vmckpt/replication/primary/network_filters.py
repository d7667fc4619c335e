"""The filters at a guest's network cards: their names, their order, and QEMU's timer. Pure.

From the guest to the wire, a packet passes the counter, `collecting`, `holding` and the sink. QEMU
empties a `filter-buffer` when its interval has passed in guest time, and only emptying the buffer
restarts the timer. So a new buffer replaces the old buffer in time; it is added between the old
buffer and the wire. The buffers of each kind are numbered: the buffer with the higher number is
nearer to the wire.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from vmckpt.units import Seconds

LONGEST = Seconds((2**32 - 1) / 1e6)
"""The longest interval that QEMU accepts: 71.6 minutes."""
_SHARE = 8
"""A buffer is replaced after an eighth of its interval."""


class Kind(StrEnum):
    """The function of a filter."""

    COUNT = "count"
    """Writes one record per packet to a file."""
    COLLECTING = "collecting"
    """Buffers the output of the open epoch while output of a closed epoch is waiting."""
    HOLDING = "holding"
    """Buffers output until its epoch is committed."""
    SINK = "sink"
    """Discards packets that leave `holding` outside a release, because of QEMU's timer."""


_ORDER = (Kind.SINK, Kind.COUNT, Kind.COLLECTING, Kind.HOLDING)
_NAME = re.compile(rf"vmckpt-({'|'.join(Kind)})(\d*)-(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Filter:
    """One filter at one network card."""

    kind: Kind
    card: str
    """libvirt's alias of the card, for example "net0"."""
    place: int = 0
    """Number of earlier filters of this kind at the card."""

    @property
    def name(self) -> str:
        """The filter's object ID in QEMU."""
        return f"vmckpt-{self.kind}{self.place or ''}-{self.card}"

    @property
    def next(self) -> Self:
        """The filter that replaces this filter."""
        return type(self)(self.kind, self.card, self.place + 1)


def found(names: Iterable[str], gone: Collection[str] = ()) -> list[Filter]:
    """Find vmckpt's filters among the names of QEMU's objects, in the order of removal.

    The sink is removed first, so that no packet is lost; then each filter is emptied into the next
    filter. The sinks of `gone` cards are removed last: packets of a card that QEMU has freed must
    not pass the sink.
    """
    matches = (_NAME.fullmatch(name) for name in names)
    ours = (Filter(Kind(one[1]), one[3], int(one[2] or 0)) for one in matches if one)

    def order(one: Filter) -> tuple[bool, int, int, str]:
        late = one.kind is Kind.SINK and one.card in gone
        return late, _ORDER.index(one.kind), one.place, one.card

    return sorted(ours, key=order)


def last(filters: Iterable[Filter]) -> dict[tuple[Kind, str], Filter]:
    """Return the filter nearest to the wire, for each kind at each card."""
    return {(one.kind, one.card): one for one in sorted(filters, key=lambda one: one.place)}


def due(armed: float, now: float, interval: Seconds) -> bool:
    """Return whether to replace a buffer whose interval began at `armed`."""
    return now - armed >= interval / _SHARE


def may_have_fired(armed: float, now: float, interval: Seconds) -> bool:
    """Return whether QEMU's timer may have emptied a buffer whose interval began at `armed`.

    The timer uses the guest's time, which never runs faster than the host's.
    """
    return now - armed >= interval
