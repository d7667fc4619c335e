"""What an agent answers when a snapshot is made or brought back, on both ends. Pure.

`parse` of each takes what an agent said, which may be anything: it raises ValueError, TypeError,
LookupError or AttributeError if that makes no sense. `client.sensible` makes one error of these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vmckpt.units import Bytes, Seconds

_AGES, _LARGEST = 1e9, 1 << 62
TEXTS, TEXT = 100, 2000
"""How many texts are taken of an agent, and how many characters of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateResult:
    """How a snapshot was made."""

    pause: Seconds
    """For how long the guest stood still."""
    way: str
    """The memory method that was used."""
    why: str
    phases: Mapping[str, Seconds] = field(default_factory=dict)
    """What the pause was spent on, by name."""
    held: Seconds | None = None
    """For how long the guest's output was held; None: it was not."""
    took: Seconds
    read: Bytes
    same: Bytes
    """Read, and in the store already."""
    zero: Bytes
    written: Bytes
    warnings: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """As the agent says it."""
        return asdict(self)

    @staticmethod
    def parse(told: Mapping[str, Any]) -> "CreateResult":
        """See the module."""
        return CreateResult(
            pause=_seconds(told["pause"]), way=str(told["way"]), why=str(told["why"]),
            phases={str(name): _seconds(time) for name, time in told["phases"].items()},
            held=None if told.get("held") is None else _seconds(told["held"]),
            took=_seconds(told["took"]), read=size(told["read"]), same=size(told["same"]),
            zero=size(told["zero"]), written=size(told["written"]),
            warnings=_texts(told["warnings"]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """How a snapshot was brought back."""

    disks: Seconds
    memory: Seconds
    took: Seconds
    warnings: Sequence[str] = ()
    whole: bool = True
    """Nothing is read from the store any more."""

    def as_json(self) -> dict[str, Any]:
        """As the agent says it."""
        return asdict(self)

    @staticmethod
    def parse(told: Mapping[str, Any]) -> "RestoreResult":
        """See the module."""
        return RestoreResult(
            disks=_seconds(told["disks"]), memory=_seconds(told["memory"]),
            took=_seconds(told["took"]), warnings=_texts(told.get("warnings", [])),
            whole=bool(told.get("whole", True)),
        )  # fmt: skip


def size(told: object) -> Bytes:
    """A number of bytes that an agent tells. Raises ValueError."""
    return Bytes(int(_number(told, _LARGEST)))


def _seconds(told: object) -> Seconds:
    return Seconds(_number(told, _AGES))


def _texts(told: object) -> tuple[str, ...]:
    """No more of them than can be read."""
    if not isinstance(told, list):
        raise TypeError(f"{str(told)[:40]!r} in the place of a list")
    return tuple(str(one)[:TEXT] for one in told[:TEXTS])


def _number(told: object, most: float) -> float:
    if isinstance(told, bool) or not isinstance(told, int | float) or not 0 <= told <= most:
        raise ValueError(f"{str(told)[:40]!r} in the place of a number")
    return told
