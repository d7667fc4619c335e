"""A migration as JSON lines, which can be replayed under other policies.

The first line describes the guest and the terms. One line follows for each sample and decision, in
order; the outcome comes last. If the migration is retried, each further attempt follows in the same
form. Times are milliseconds since the attempt began. An incomplete trace can be replayed as far as
it goes.
"""

import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from vmckpt.errors import BadInput
from vmckpt.migration import report
from vmckpt.migration.forecast.dirty_curve import DirtyCurve
from vmckpt.model.events import Decided, Event, Sampled
from vmckpt.model.migration import Decision, JobPhase, JobSample, Mode, Outcome
from vmckpt.units import Bytes, BytesPerSecond, Seconds
from vmckpt.util import config_file

VERSION = "vmckpt/v1"
# Enough for days of samples.
_MOST_BYTES = 64 << 20
_MOST_SAMPLES = 500_000
# Bound for milliseconds and for bytes: far above any migration, and exact as a float.
_MOST = 1 << 53
_MOST_POINTS = 1000
_MOST_PASSES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The data that a replay needs besides the samples."""

    guest: str
    memory: Bytes
    policy: str
    mode: Mode
    post_copy: bool
    """Whether the migration could switch to post-copy."""
    curve: DirtyCurve
    """The dirtying curve that was measured before the migration began."""

    def as_json(self) -> dict[str, Any]:
        return {
            "trace": VERSION,
            "guest": self.guest,
            "memory": self.memory,
            "policy": self.policy,
            "mode": str(self.mode),
            "post_copy": self.post_copy,
            "curve": [[time, dirtied] for time, dirtied in self.curve.points],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A trace read from a file."""

    header: Header
    samples: tuple[JobSample, ...]
    decisions: tuple[Decision, ...]
    outcome: str | None
    """The recorded outcome; None if the trace is incomplete."""


class Tracer:
    """Writes a trace line by line; a write error ends the trace, not the migration."""

    def __init__(self, path: Path) -> None:
        """Check that the file does not exist: it is never overwritten. Raises BadInput."""
        if path.exists():
            raise BadInput(f"{path} already exists", hint="choose another file with --trace")
        self._path = path
        self._file: IO[str] | None = None
        self._began: Seconds | None = None

    def begin(self, header: Header, began: Seconds) -> None:
        """Write the header of an attempt. Raises OSError if the file cannot be newly created.

        `began`: when the attempt began, on the clock of the samples.
        """
        if self._began is None:
            self._file = self._path.open("x", encoding="utf-8")
        self._began = began
        self._write(header.as_json())

    def take(self, event: Event) -> None:
        """Write a sample or decision; ignore other events."""
        if self._began is None:
            return
        match event:
            case Sampled():
                self._write({"sample": report.sample_as_json(event.sample, self._began)})
            case Decided():
                self._write({"decision": report.decision_as_json(event.decision, self._began)})
            case _:
                pass

    def end(self, outcome: Outcome) -> None:
        """Write the outcome of the attempt."""
        self._write({"outcome": str(outcome)})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError:
            self._file = None


def read(path: Path) -> Trace:
    """Return the last attempt in a file. Raises BadInput if the file is not a readable trace."""
    text = config_file.read(path, BadInput, "trace", most=_MOST_BYTES)
    return parse(io.StringIO(text), str(path))


def parse(lines: Iterable[str], name: str) -> Trace:
    """Return the last attempt in these lines, as `read` does. `name` is the file in errors.

    Raises BadInput.
    """
    header: Header | None = None
    samples: list[JobSample] = []
    decisions: list[Decision] = []
    outcome: str | None = None
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text, parse_constant=_no_number)
            if "trace" in line:
                header, samples, decisions, outcome = _header(line), [], [], None
            elif "sample" in line:
                samples.append(_sample(line["sample"]))
                _in_order(samples)
            elif "decision" in line:
                decisions.append(_decision(line["decision"]))
            told = line.get("outcome", outcome)
            outcome = None if told is None else _text(told)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
            raise BadInput(
                f"{name}:{number}: not a valid line of a trace ({str(exc)[:80]})",
                hint="record a trace with vmckpt migrate GUEST --to HOST --trace FILE",
            ) from exc
    if header is None or not samples:
        raise BadInput(
            f"{name}: not a trace, or a trace without samples",
            hint="record a trace with vmckpt migrate GUEST --to HOST --trace FILE",
        )
    return Trace(header=header, samples=tuple(samples), decisions=tuple(decisions), outcome=outcome)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a finite number")


def _in_order(samples: list[JobSample]) -> None:
    if len(samples) > _MOST_SAMPLES:
        raise ValueError(f"more than {_MOST_SAMPLES} samples")
    if len(samples) > 1 and samples[-1].at < samples[-2].at:
        raise ValueError("time goes backwards")


def _number(value: object, most: int = _MOST) -> float:
    """Return `value` if it is a number from 0 to `most`. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"expected a number from 0 to {most}, not {str(value)[:40]!r}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, not {str(value)[:40]!r}")
    return value


def _time(milliseconds: object) -> Seconds:
    return Seconds(_number(milliseconds) / 1000)


def _when(milliseconds: object) -> Seconds:
    """Return the time since the migration began; slightly negative for earlier decisions."""
    if isinstance(milliseconds, int | float) and milliseconds < 0:
        return Seconds(-_number(-milliseconds) / 1000)
    return _time(milliseconds)


def _header(line: dict[str, Any]) -> Header:
    if line["trace"] != VERSION:
        raise ValueError(f"version {str(line['trace'])[:40]!r} is not {VERSION}")
    memory = Bytes(int(_number(line["memory"])))
    if not memory:
        raise ValueError("the guest has no memory")
    points = tuple((_number(time), _number(dirtied)) for time, dirtied in line["curve"])
    if len(points) > _MOST_POINTS or not all(time > 0 for time, _ in points):
        raise ValueError("the curve is invalid")
    return Header(
        guest=_text(line["guest"]),
        memory=memory,
        policy=_text(line["policy"]),
        mode=Mode(line["mode"]),
        post_copy=bool(line["post_copy"]),
        curve=DirtyCurve(points, memory),
    )


def _sample(line: dict[str, Any]) -> JobSample:
    rate, expected = line["dirty_rate"], line["expected_downtime_ms"]
    return JobSample(
        at=_when(line["at_ms"]),
        phase=JobPhase(line["phase"]),
        iteration=int(_number(line["iteration"], _MOST_PASSES)),
        remaining=Bytes(int(_number(line["remaining"]))),
        total=Bytes(int(_number(line["total"]))),
        transferred=Bytes(int(_number(line["transferred"]))),
        bandwidth=BytesPerSecond(int(_number(line["bandwidth"]))),
        dirty_rate=None if rate is None else BytesPerSecond(int(_number(rate))),
        expected_downtime=None if expected is None else _time(expected),
        throttle=int(_number(line["throttle"])),
    )


def _decision(line: dict[str, Any]) -> Decision:
    numbers = line["numbers"]
    if not isinstance(numbers, Mapping):
        raise TypeError("`numbers` is not an object")
    return Decision(
        at=_when(line["at_ms"]),
        action=_text(line["action"]),
        reason=_text(line["reason"]),
        rule=_text(line["rule"]),
        acted=bool(line["acted"]),
        numbers={key: _plain(value) for key, value in numbers.items()},
    )


def _plain(value: object) -> float | int | str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and math.isfinite(value):
        return value
    raise TypeError(f"expected a finite number, text or null, not {str(value)[:40]!r}")
