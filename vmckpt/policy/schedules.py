"""Schedules of snapshots as a policy has them. Pure data."""

from dataclasses import dataclass, field, fields
from enum import StrEnum

from vmckpt.policy.calendar import When
from vmckpt.units import Seconds

FAILURE = Seconds(30 * 86400.0)
"""`one_failure_in` if the file does not say."""


_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def period(time: Seconds) -> str:
    """A time as schedules have it: "15min", "7d"."""
    for size, unit in _UNITS:
        if time >= size and time % size == 0:
            return f"{time / size:g}{unit}"
    return f"{time:g}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """How many of each; all 0: everything stays."""

    last: int = 0
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0

    @property
    def nothing_said(self) -> bool:
        """No rule at all: then nothing may go."""
        return all(getattr(self, one.name) <= 0 for one in fields(self))

    def __str__(self) -> str:
        said = [(one.name, getattr(self, one.name)) for one in fields(self)]
        return ", ".join(f"{count} {name}" for name, count in said if count) or "all"


@dataclass(frozen=True, slots=True)
class Auto:
    """As often as it pays (Young, Daly)."""

    one_failure_in: Seconds = FAILURE
    """What is assumed before anything is known."""


class Check(StrEnum):
    """How much of a snapshot is looked at."""

    SEALED = "sealed"
    """What can be proved without a private key: every bit of what is stored."""
    DEEP = "deep"
    """Every chunk is opened, too, and must fit its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How often the snapshots of a schedule are verified."""

    every: Seconds
    depth: Check = Check.SEALED


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTo:
    """Another store that snapshots are copied to, and what stays there."""

    store: str
    keep: Keep = field(default_factory=Keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When snapshots of a guest are taken, where they go, and which stay."""

    name: str
    """The tag that its snapshots have; what it prunes by."""
    when: When | Auto
    text: str
    """`when` as it was written: "every 15m", "daily 03:00"."""
    keep: Keep = field(default_factory=Keep)
    memory: bool = True
    group: bool = False
    """All guests that have it are captured as one consistent cut."""
    store: str | None = None
    """Where they land; None: in the first store of the inventory."""
    copies: tuple[CopyTo, ...] = ()
    verify: Proof | None = None
