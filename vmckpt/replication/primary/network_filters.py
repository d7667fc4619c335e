"""The filters at a guest's network cards: their names, their order, and QEMU's timer. Pure.

From the guest to the wire, a packet passes the counter, `collecting`, `holding` and the sink. QEMU
empties a `filter-buffer` when its interval has passed, in the guest's own time, and only emptying
the buffer restarts that timer. So another buffer replaces it in time, between it and the wire. The
buffers are numbered: of two buffers of one kind, the one with the higher number is nearer to the
wire.
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
    """What a filter does."""

    COUNT = "count"
    """Writes one record per packet to a file."""
    COLLECTING = "collecting"
    """Buffers the output of the open epoch while output of a closed epoch waits."""
    HOLDING = "holding"
    """Buffers output until its epoch is committed."""
    SINK = "sink"
    """Discards what leaves `holding` because of QEMU's timer, outside a release."""


_ORDER = (Kind.SINK, Kind.COUNT, Kind.COLLECTING, Kind.HOLDING)
_NAME = re.compile(rf"vmckpt-({'|'.join(Kind)})(\d*)-(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Filter:
    """One filter at one network card."""

    kind: Kind
    card: str
    """libvirt's alias of the card: "net0"."""
    place: int = 0
    """Number of filters of this kind that the card had before."""

    @property
    def name(self) -> str:
        """The filter's object ID in QEMU."""
        return f"vmckpt-{self.kind}{self.place or ''}-{self.card}"

    @property
    def next(self) -> Self:
        """The filter that replaces this one."""
        return type(self)(self.kind, self.card, self.place + 1)


def found(names: Iterable[str], gone: Collection[str] = ()) -> list[Filter]:
    """Find vmckpt's filters among the names of QEMU's objects, in the order to remove them.

    The sink is first, so that nothing is lost; then each filter is emptied into the next. The sinks
    of `gone` cards are last: packets of a card that QEMU has freed must not get beyond them.
    """
    matches = (_NAME.fullmatch(name) for name in names)
    ours = (Filter(Kind(one[1]), one[3], int(one[2] or 0)) for one in matches if one)

    def order(one: Filter) -> tuple[bool, int, int, str]:
        late = one.kind is Kind.SINK and one.card in gone
        return late, _ORDER.index(one.kind), one.place, one.card

    return sorted(ours, key=order)


def last(filters: Iterable[Filter]) -> dict[tuple[Kind, str], Filter]:
    """Return the filter nearest to the wire, of each kind at each card."""
    return {(one.kind, one.card): one for one in sorted(filters, key=lambda one: one.place)}


def due(armed: float, now: float, interval: Seconds) -> bool:
    """Return whether to replace a buffer whose interval began at `armed`."""
    return now - armed >= interval / _SHARE


def may_have_fired(armed: float, now: float, interval: Seconds) -> bool:
    """Return whether QEMU's timer may have emptied a buffer whose interval began at `armed`.

    The timer uses the guest's time, which never runs faster than the host's.
    """
    return now - armed >= interval
