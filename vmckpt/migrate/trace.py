"""A migration as JSON lines, to be replayed under other policies.

The first line tells of the guest and the terms; then one line for each sample and decision in their
order, and the outcome at the end. Times are milliseconds since the migration began. A trace that
breaks off can be replayed as far as it goes.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from vmckpt.errors import BadInput
from vmckpt.migrate import report
from vmckpt.migrate.dirtying import DirtyCurve
from vmckpt.model.events import Decided, Event, Sampled
from vmckpt.model.jobs import Decision, JobPhase, JobSample, Outcome
from vmckpt.model.orders import Mode
from vmckpt.units import Bytes, BytesPerSecond, Seconds

VERSION = "vmckpt/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a replay must know beside the samples."""

    guest: str
    memory: Bytes
    policy: str
    mode: Mode
    post_copy: bool
    """It could be switched."""
    curve: DirtyCurve
    """What was measured before it began."""

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
    """One that was read."""

    header: Header
    samples: tuple[JobSample, ...]
    decisions: tuple[Decision, ...]
    outcome: str | None
    """None: it breaks off."""


class Tracer:
    """Writes a trace line by line; a full disk ends the trace, not the migration."""

    def __init__(self, path: Path) -> None:
        """Raises BadInput if the file is there: it is not written over."""
        if path.exists():
            raise BadInput(f"{path} is there already", mend="name another file with --trace")
        self._path = path
        self._file: IO[str] | None = None
        self._began: Seconds | None = None

    def begin(self, header: Header, began: Seconds) -> None:
        """An attempt begins. Raises OSError if the file cannot be made."""
        if self._began is None:
            self._file = self._path.open("x", encoding="utf-8")
        self._began = began
        self._write(header.as_json())

    def take(self, event: Event) -> None:
        """Write what belongs into a trace."""
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
        """The attempt has ended so."""
        self._write({"outcome": str(outcome)})

    def close(self) -> None:
        """No more is to come."""
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
    """The last attempt in a trace file. Raises BadInput with file and line."""
    try:
        return parse(path.read_text(encoding="utf-8").splitlines(), str(path))
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise BadInput(f"{path}: {reason}") from exc


def parse(lines: Iterable[str], name: str) -> Trace:
    """As `read`, from lines."""
    header: Header | None = None
    samples: list[JobSample] = []
    decisions: list[Decision] = []
    outcome: str | None = None
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            if "trace" in line:
                header, samples, decisions, outcome = _header(line), [], [], None
            elif "sample" in line:
                samples.append(_sample(line["sample"]))
            elif "decision" in line:
                decisions.append(_decision(line["decision"]))
            outcome = line.get("outcome", outcome)
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise BadInput(
                f"{name}:{number}: no line of a trace ({exc})",
                mend="traces are written by vmckpt migrate --trace FILE",
            ) from exc
    if header is None or not samples:
        raise BadInput(f"{name}: no trace, or one without samples", mend="use migrate --trace FILE")
    return Trace(header=header, samples=tuple(samples), decisions=tuple(decisions), outcome=outcome)


def _header(line: dict[str, Any]) -> Header:
    if line["trace"] != VERSION:
        raise ValueError(f"version {line['trace']!r} is not {VERSION}")
    memory = Bytes(int(line["memory"]))
    points = tuple((float(time), float(dirtied)) for time, dirtied in line["curve"])
    return Header(
        guest=str(line["guest"]),
        memory=memory,
        policy=str(line["policy"]),
        mode=Mode(line["mode"]),
        post_copy=bool(line["post_copy"]),
        curve=DirtyCurve(points, memory),
    )


def _sample(line: dict[str, Any]) -> JobSample:
    rate, expected = line["dirty_rate"], line["expected_downtime_ms"]
    return JobSample(
        at=Seconds(line["at_ms"] / 1000),
        phase=JobPhase(line["phase"]),
        iteration=int(line["iteration"]),
        remaining=Bytes(int(line["remaining"])),
        total=Bytes(int(line["total"])),
        transferred=Bytes(int(line["transferred"])),
        bandwidth=BytesPerSecond(int(line["bandwidth"])),
        dirty_rate=None if rate is None else BytesPerSecond(int(rate)),
        expected_downtime=None if expected is None else Seconds(expected / 1000),
        throttle=int(line["throttle"]),
    )


def _decision(line: dict[str, Any]) -> Decision:
    return Decision(
        at=Seconds(line["at_ms"] / 1000),
        action=line["action"],
        reason=line["reason"],
        rule=line["rule"],
        acted=line["acted"],
        numbers=line["numbers"],
    )
