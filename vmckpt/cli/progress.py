"""Live progress of a migration, or of all moves of an evacuation: as a panel or as log lines."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vmckpt.cli import output
from vmckpt.journal import serialization, wording
from vmckpt.model.events import (
    Checked,
    Copied,
    Decided,
    Estimate,
    Event,
    OnItsWay,
    PhaseChanged,
    Sampled,
    WorkDone,
    WorkFailed,
)
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.migration import JobPhase, JobSample
from vmckpt.units import Seconds, show_bytes, show_rate, show_seconds

if TYPE_CHECKING:
    from vmckpt.journal.jobs import JobView

_LOG_EVERY = 1.0


def _left(estimate: Estimate) -> str:
    return wording.time_left(estimate.low, estimate.high, converging=estimate.converging)


def show_downtime(sample: JobSample) -> str:
    """Format QEMU's expected downtime; a dash if it is not known."""
    return "–" if sample.expected_downtime is None else show_seconds(sample.expected_downtime)


class Progress:
    """The progress of one migration. Use it as a context manager around the migration."""

    def __init__(self, title: str, *, warnings: bool = True) -> None:
        """`warnings`: print preflight's warnings; False if the command prints all findings."""
        self._warnings = warnings
        self._title = title
        self._phase = JobPhase.PREFLIGHT
        self._last: Sampled | None = None
        self._began = time.monotonic()
        self._logged = 0.0
        self._live: Live | None = None
        self._told: list[Finding] = []

    def __enter__(self) -> "Progress":
        if output.err.is_terminal:
            self._live = Live(
                get_renderable=self._panel, console=output.err, refresh_per_second=8, transient=True
            )
            self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def take(self, event: Event) -> None:
        """Show one event."""
        match event:
            case PhaseChanged():
                self._phase = event.phase
                if self._live is None:
                    self._log(f"phase={event.phase}")
            case Checked():
                # Each attempt is checked again, and most of its warnings are the same.
                found = [
                    one for one in event.findings
                    if one.severity is Severity.WARNING and one not in self._told
                ]  # fmt: skip
                self._told += found
                output.findings(output.err, found if self._warnings else [])
            case Copied() | OnItsWay() | WorkFailed() | WorkDone():
                pass  # events of other operations, which have their own output
            case Decided():
                self._log(f"decided action={event.decision.action} ({event.decision.reason})")
            case Sampled():
                self._last = event
                if self._live is None and time.monotonic() - self._logged >= _LOG_EVERY:
                    self._logged = time.monotonic()
                    self._log(line(event))

    def _log(self, text: str) -> None:
        output.say(f"{time.monotonic() - self._began:7.1f}s {text}")

    def _panel(self) -> Group:
        elapsed = Seconds(time.monotonic() - self._began)
        return panel(self._title, str(self._phase), elapsed, self._last)


def panel(title: str, phase: str, elapsed: Seconds, last: Sampled | None) -> Group:
    """Return the panel that shows a running migration on a terminal.

    `phase`: what is being done; `elapsed`: time since the start; `last`: the last sample, if any.
    """
    head = Table.grid(padding=(0, 2))
    head.add_row(Text(title, "bold"), phase, show_seconds(elapsed))
    if last is None:
        return Group(head)
    sample = last.sample
    # A line break follows the bar only if the bar is in a grid.
    bar = Table.grid()
    bar.add_row(ProgressBar(total=1.0, completed=last.done, width=60))
    left = f"{show_bytes(sample.remaining)} of {show_bytes(sample.total)}"
    dirty = "–" if sample.dirty_rate is None else show_rate(sample.dirty_rate)
    grid = Table.grid(padding=(0, 2))
    grid.add_row("iteration", str(sample.iteration), "remaining", left)
    grid.add_row("bandwidth", show_rate(sample.bandwidth), "dirty rate", dirty)
    time_left = _left(last.estimate)
    grid.add_row("expected downtime", show_downtime(sample), "time left", time_left)
    return Group(head, bar, grid)


def line(event: Sampled) -> str:
    """Return a sample as a log line."""
    sample = event.sample
    dirty = "-" if sample.dirty_rate is None else show_rate(sample.dirty_rate)
    return (
        f"{sample.phase} iteration={sample.iteration} remaining={show_bytes(sample.remaining)}"
        f" bandwidth={show_rate(sample.bandwidth)} dirty={dirty}"
        f" expected-downtime={show_downtime(sample)} left={_left(event.estimate)}"
    )


LOG_EVERY = 10.0
_SHOWN = 10
"""Maximum number of guests that are shown at once."""


@dataclass(frozen=True, slots=True)
class Row:
    """A guest that is being moved."""

    guest: str
    target: str
    sampled: Sampled

    @property
    def left(self) -> str:
        """The estimated time left, in words."""
        estimate = self.sampled.estimate
        return wording.time_left(estimate.low, estimate.high, converging=estimate.converging)


def rows_of(parts: "Iterable[JobView]") -> list[Row]:
    """Return the running migrations of a job that have a sample."""
    return [
        Row(one.operation.guest, one.operation.target or "?", serialization.as_sampled(one.sample))
        for one in parts
        if one.operation.active and one.sample is not None
    ]


def rows_panel(title: str, doing: str, elapsed: Seconds, rows: list[Row]) -> Group:
    """Return the panel that shows all moves on a terminal. It fits into 80 columns.

    `doing`: a summary of the run's state; `elapsed`: time since the start.
    """
    head = Table.grid(padding=(0, 2))
    head.add_row(Text(title, "bold"), doing, show_seconds(elapsed))
    grid = Table.grid(padding=(0, 2))
    for row in rows[:_SHOWN]:
        sample = row.sampled.sample
        grid.add_row(
            f"{row.guest} → {row.target}",
            ProgressBar(total=1.0, completed=row.sampled.done, width=16),
            f"{show_bytes(sample.remaining)} left",
            show_rate(sample.bandwidth),
            row.left,
        )
    more = [Text(f"and {len(rows) - _SHOWN} more")] if len(rows) > _SHOWN else []
    return Group(head, grid, *more)


def rows_line(rows: list[Row]) -> str:
    """Return all moves as a log line."""
    shown = [f"{row.guest} → {row.target} {row.sampled.done:.0%} ({row.left})" for row in rows]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return f"moving: {', '.join(shown[:_SHOWN])}{more}"
