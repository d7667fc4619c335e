"""Parse the values of policy keys into vmckpt's types. Pure."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeVar

from pydantic import BeforeValidator, InstanceOf, WithJsonSchema

from vmckpt import units
from vmckpt.model.migration import Compression, Mode
from vmckpt.policy import calendar
from vmckpt.policy.calendar import Hourly, Interval, Monthly, Weekly
from vmckpt.policy.model import (
    Check,
    CopyKind,
    Failover,
    LeftBehind,
    OnFailure,
    Order,
    Strategy,
    Tls,
)
from vmckpt.units import MIB, Bytes, BytesPerSecond, Seconds
from vmckpt.util.config_file import likely

W = TypeVar("W", bound=StrEnum)

LONGEST_DOWNTIME = Seconds(2000.0)
"""The longest downtime that QEMU accepts."""
_LARGEST = 1 << 60

_NUMBER = r"[0-9]{1,12}(\.[0-9]{1,12})?"
_TIME = rf"{_NUMBER} ?(us|µs|ms|s|m|min|h)"
_SIZE = rf"{_NUMBER} ?[kKmMgGtT]?(i?[bB])?"
_RATE = rf"{_NUMBER} ?([kmgKMG]?bit(/s)?|[kKmMgGtT]?(i?[bB])?/s)"
_PERCENT = rf"{_NUMBER} ?%"


class Plain(StrEnum):
    """The actions of a rule that need no values."""

    START_POSTCOPY = "start_postcopy"
    PAUSE = "pause"
    ABORT = "abort"


WITH_VALUES = {
    "raise_downtime": "{raise_downtime: {by: 50ms, to: 500ms}}",
    "auto_converge": "{auto_converge: {initial: 20, increment: 10, at_most: 60}}",
    "compress": "{compress: {cache: 64MiB}}",
}
"""The actions of a rule that need values, with an example of each."""


@dataclass(frozen=True, slots=True)
class TimeUsed:
    """The time that a migration has used, either as a time or as a share of its time limit."""

    time: Seconds | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A calendar expression, as written and as parsed."""

    text: str
    when: Hourly | Weekly | Monthly


def _time(value: object) -> Seconds:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a time; use a value with a unit, like 300ms or 5m")
    time = units.parse_seconds(value)
    if time <= 0:
        raise ValueError(f"{value!r} must be greater than 0")
    return time


def _downtime(value: object) -> Seconds:
    time = _time(value)
    if time > LONGEST_DOWNTIME:
        raise ValueError(f"{value!r} is more than QEMU accepts; the maximum is 2000s")
    return time


def _time_or_unlimited(value: object) -> Seconds | None:
    return None if value == "unlimited" else _time(value)


def _size(value: object) -> Bytes:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{value!r} is not a size; use a value like 64MiB or 2GiB")
    size = units.parse_bytes(str(value))
    if not 0 < size <= _LARGEST:
        raise ValueError(f"{value!r}: a size must be greater than 0 and at most 1048576TiB")
    return size


def _rate(value: object) -> BytesPerSecond | None:
    if value == "unlimited":
        return None
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a rate; use a value like 200MiB/s, 1gbit or unlimited")
    rate = units.parse_rate(value)
    if not MIB <= rate <= _LARGEST:
        raise ValueError(f"{value!r}: libvirt sets limits in whole MiB/s; the minimum is 1MiB/s")
    return rate


def _share(value: object, *, most: float, example: str) -> float:
    """Parse a share such as "80%" or 0.8.

    `example`: a valid value for the error. Raises ValueError if `value` is not a share, or is not
    between 0.0001 and `most`.
    """
    share: float | None = None
    if isinstance(value, str) and re.fullmatch(_PERCENT, value):
        share = float(value.rstrip("% ")) / 100
    elif isinstance(value, int | float) and not isinstance(value, bool):
        share = float(value)
    if share is None:
        raise ValueError(f"{value!r} is not a share; use a value like {example}")
    # The negated comparison also refuses NaN.
    if not 0.0001 <= share <= most:
        raise ValueError(
            f"{value!r} is not between 0.01% and {most:.0%}; use a value like {example}"
        )
    return share


def _part(value: object) -> float:
    return _share(value, most=0.99, example="4%")


def _ratio(value: object) -> float:
    return _share(value, most=10.0, example="80%")


def _time_used(value: object) -> TimeUsed:
    if isinstance(value, str) and not value.strip().endswith("%"):
        return TimeUsed(time=_time(value))
    try:
        return TimeUsed(share=_share(value, most=0.99, example="80%"))
    except ValueError as exc:
        raise ValueError(f"{exc}, or a time like 5m; at 100% the migration is cancelled") from None


def _per_cent(value: object) -> int:
    text = str(value).removesuffix("%").strip()
    if isinstance(value, bool) or not re.fullmatch("[0-9]{1,2}", text) or int(text) == 0:
        raise ValueError(f"{value!r} is not a percentage of CPU time from 1 to 99")
    return int(text)


def _probe(value: object) -> Seconds:
    if value == "off" or value is False:  # YAML reads a bare off as false
        return Seconds(0.0)
    time = _time(value)
    if not 1 <= time <= 60:
        raise ValueError(f"{value!r} is not between 1s and 60s; use off to disable the measurement")
    return time


def _recovery(value: object) -> Seconds:
    """Parse how long to try to resume a broken post-copy automatically. Returns 0 for never.

    Raises ValueError.
    """
    if value == "ask":
        return Seconds(0.0)
    match = re.fullmatch(r"recover for (\S+?),? then ask", value if isinstance(value, str) else "")
    if match is None:
        raise ValueError(f"{value!r} is invalid; use 'recover for 10m, then ask' or 'ask'")
    return _time(match[1])


def _period(value: object) -> Seconds:
    """Parse a time, in units from seconds to days. Raises ValueError."""
    text = value if isinstance(value, str) else ""
    try:
        found = calendar.parse(text)
    except ValueError:
        found = None
    if not isinstance(found, Interval):
        raise ValueError(f"{value!r} is not a time; use a value like 15min, 6h or 7d")
    return found.every


def _every(value: object) -> Seconds | None:
    """Parse an interval. Returns None for auto. Raises ValueError."""
    try:
        return None if value == "auto" else _period(value)
    except ValueError as exc:
        raise ValueError(f"{exc}, or auto; for a time of day, use 'at: daily 03:00'") from None


def _at(value: object) -> Written:
    text = value if isinstance(value, str) else repr(value)
    found = calendar.parse(text)
    if isinstance(found, Interval):
        raise ValueError(f"{text!r} is an interval, not a calendar time; write every: {text}")
    return Written(text=" ".join(text.lower().split()), when=found)


def _word(kind: type[W]) -> Callable[[object], W]:
    """Return a parser for an enum's values."""

    def read(value: object) -> W:
        text = "off" if value is False else value  # YAML reads a bare off as false
        words = [str(one) for one in kind]
        if text in words:
            return kind(text)
        raise ValueError(f"{value!r} is not a valid value{likely(str(text), words)}")

    return read


def _plain(value: object) -> Plain:
    word = value if isinstance(value, str) else ""
    if word in WITH_VALUES:
        raise ValueError(f"{word} needs values, like {WITH_VALUES[word]}")
    if word in [str(one) for one in Plain]:
        return Plain(word)
    known = [*map(str, Plain), *WITH_VALUES]
    raise ValueError(f"{value!r} is not a rule action{likely(word, known)}")


def _text(pattern: str, *examples: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": f"^{pattern}$", "examples": [*examples]})


def _one_of(pattern: str, *examples: str) -> WithJsonSchema:
    """Return the JSON schema of a share: "80%" or 0.8.

    `pattern`: regular expression for its text form.
    """
    text = {"type": "string", "pattern": f"^{pattern}$"}
    return WithJsonSchema({"anyOf": [text, {"type": "number"}], "examples": [*examples]})


def _enum(kind: type[StrEnum]) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "enum": [str(one) for one in kind]})


Time = Annotated[Seconds, BeforeValidator(_time), _text(_TIME, "300ms", "5m")]
Downtime = Annotated[Seconds, BeforeValidator(_downtime), _text(_TIME, "300ms")]
TimeLimit = Annotated[
    Seconds | None,
    BeforeValidator(_time_or_unlimited),
    _text(f"({_TIME}|unlimited)", "30m", "unlimited"),
]
Size = Annotated[
    Bytes,
    BeforeValidator(_size),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "pattern": f"^{_SIZE}$"}, {"type": "integer", "minimum": 1}]}
    ),
]
Rate = Annotated[
    BytesPerSecond | None,
    BeforeValidator(_rate),
    _text(f"({_RATE}|unlimited)", "200MiB/s", "1gbit", "unlimited"),
]
Part = Annotated[float, BeforeValidator(_part), _one_of(_PERCENT, "4%")]
"""A share below one, such as "4%"."""
Ratio = Annotated[float, BeforeValidator(_ratio), _one_of(_PERCENT, "80%")]
"""A share that may exceed 1."""
TimeUsedValue = Annotated[
    InstanceOf[TimeUsed], BeforeValidator(_time_used), _one_of(f"({_PERCENT}|{_TIME})", "80%", "5m")
]
PerCent = Annotated[
    int,
    BeforeValidator(_per_cent),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": 99},
                {"type": "string", "pattern": "^[1-9][0-9]?%$"},
            ]
        }
    ),
]
Probe = Annotated[
    Seconds,
    BeforeValidator(_probe),
    # Editors that parse YAML like vmckpt read a bare off as false.
    WithJsonSchema(
        {"anyOf": [{"type": "string", "pattern": f"^({_TIME}|off)$"}, {"const": False}]}
    ),
]
Recovery = Annotated[
    Seconds,
    BeforeValidator(_recovery),
    _text(
        rf"(ask|recover for {_NUMBER}(us|µs|ms|s|m|min|h),? then ask)", "recover for 10m, then ask"
    ),
]
_PERIOD = "([0-9]{1,6}(s|min|m|h|d))+"
Period = Annotated[Seconds, BeforeValidator(_period), _text(_PERIOD, "15min", "7d")]
Often = Annotated[
    Seconds | None, BeforeValidator(_every), _text(f"({_PERIOD}|auto)", "15min", "6h", "auto")
]
Calendar = Annotated[
    InstanceOf[Written],
    BeforeValidator(_at),
    WithJsonSchema(
        {"type": "string", "examples": ["hourly", "daily 03:00", "mon..fri 22:30", "monthly last"]}
    ),
]
CheckWord = Annotated[Check, BeforeValidator(_word(Check)), _enum(Check)]
ModeWord = Annotated[Mode, BeforeValidator(_word(Mode)), _enum(Mode)]
TlsWord = Annotated[
    Tls,
    BeforeValidator(_word(Tls)),
    WithJsonSchema({"enum": [*map(str, Tls), False]}),
]
CompressionWord = Annotated[Compression, BeforeValidator(_word(Compression)), _enum(Compression)]
CopyWord = Annotated[CopyKind, BeforeValidator(_word(CopyKind)), _enum(CopyKind)]
LeftWord = Annotated[LeftBehind, BeforeValidator(_word(LeftBehind)), _enum(LeftBehind)]
StrategyWord = Annotated[Strategy, BeforeValidator(_word(Strategy)), _enum(Strategy)]
OrderWord = Annotated[Order, BeforeValidator(_word(Order)), _enum(Order)]
FailoverWord = Annotated[Failover, BeforeValidator(_word(Failover)), _enum(Failover)]
FailureWord = Annotated[OnFailure, BeforeValidator(_word(OnFailure)), _enum(OnFailure)]
PlainWord = Annotated[Plain, BeforeValidator(_plain), _enum(Plain)]
