"""Results of orders that create or restore a snapshot, for both agent and controller. Pure.

Each `parse` reads an agent's answer, which is untrusted, and raises ValueError, TypeError,
LookupError or AttributeError if the answer is invalid; `client.sensible` maps these errors to
RemoteError.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vmckpt.units import Bytes, Seconds

_AGES, _LARGEST = 1e9, 1 << 62
TEXTS, TEXT = 100, 2000
"""Maximum number of texts accepted from an agent, and maximum length of each, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateResult:
    """How a snapshot was created, and how much time and data it took."""

    pause: Seconds
    """How long the guest was paused."""
    way: str
    """Method by which memory was captured."""
    why: str
    """Why this method was used."""
    phases: Mapping[str, Seconds] = field(default_factory=dict)
    """Duration of each phase of the pause, by name."""
    held: Seconds | None = None
    """How long the guest's output was buffered; None: it was not buffered."""
    took: Seconds
    read: Bytes
    same: Bytes
    """Data that was already in the store."""
    zero: Bytes
    written: Bytes
    warnings: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the result as the agent sends it."""
        return asdict(self)

    @staticmethod
    def parse(told: Mapping[str, Any]) -> "CreateResult":
        """Parse an agent's answer. Raises as described in the module's docstring."""
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
    """How a snapshot was restored."""

    disks: Seconds
    memory: Seconds
    took: Seconds
    warnings: Sequence[str] = ()
    whole: bool = True
    """The disks are complete: the guest no longer reads from the store."""
    links_down: str = ""
    """Why a fork's links are down although they should be up; empty: they are as requested."""
    bases: Mapping[str, str] = field(default_factory=dict)
    """Path of the base image of each disk that is an overlay, by disk name."""
    clock_not_set: str = ""
    """Why the guest's clock still has the time of the snapshot; empty: it was set."""

    def as_json(self) -> dict[str, Any]:
        """Return the result as the agent sends it."""
        return asdict(self)

    @staticmethod
    def parse(told: Mapping[str, Any]) -> "RestoreResult":
        """Parse an agent's answer. Raises as described in the module's docstring."""
        return RestoreResult(
            disks=_seconds(told["disks"]), memory=_seconds(told["memory"]),
            took=_seconds(told["took"]), warnings=_texts(told.get("warnings", [])),
            whole=bool(told.get("whole", True)),
            links_down=str(told.get("links_down", ""))[:TEXT],
            clock_not_set=str(told.get("clock_not_set", ""))[:TEXT],
            bases={str(name)[:TEXT]: str(path)[:TEXT]
                   for name, path in list(dict(told.get("bases", {})).items())[:TEXTS]},
        )  # fmt: skip


def size(told: object) -> Bytes:
    """Return a number of bytes from an agent's answer. Raises ValueError."""
    return Bytes(int(_number(told, _LARGEST)))


def _seconds(told: object) -> Seconds:
    return Seconds(_number(told, _AGES))


def _texts(told: object) -> tuple[str, ...]:
    """Return a list of texts, cut to TEXTS entries of TEXT characters. Raises TypeError."""
    if not isinstance(told, list):
        raise TypeError(f"expected a list, not {str(told)[:40]!r}")
    return tuple(str(one)[:TEXT] for one in told[:TEXTS])


def _number(told: object, most: float) -> float:
    if isinstance(told, bool) or not isinstance(told, int | float) or not 0 <= told <= most:
        raise ValueError(f"expected a number from 0 to {most:g}, not {str(told)[:40]!r}")
    return told
