"""vmckpt watch: the progress of a job, from the journal."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live

from vmckpt.cli import output, progress
from vmckpt.cli.arguments import INVENTORY, JOB
from vmckpt.errors import OrphanedJobs
from vmckpt.journal import evacuation_progress, serialization, wording
from vmckpt.journal.records import WHOLE_HOST, Operation, StoredSample, StoredStep
from vmckpt.model.events import Sampled
from vmckpt.units import Seconds, show_seconds

if TYPE_CHECKING:
    from vmckpt.journal.jobs import Follower, JobView, News

_LOOK_EVERY = 0.5
_LOG_EVERY = 1.0
_PROTECT = "protect"


def watch(
    job: JOB,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object per line, from the start of the job."),
    ] = False,
    inventory: INVENTORY = None,
) -> None:
    """Watch a job until it ends.

    The job may have been started in another terminal or on another controller. Ctrl-C stops
    watching; the job continues.

    For a protection, the agents are queried once per second, starting now. A line is printed every
    10 seconds, and immediately when the phase, the state of the standby, the problem or the number
    of lost packets changes, or when the interval changes by a quarter.

    The exit code is 0 once the job has ended, whatever its outcome, and 17 if the job's controller
    is dead.

    Examples:

        vmckpt watch m-7k3f

        vmckpt watch web1 --json
    """
    from vmckpt.journal import jobs
    from vmckpt.journal.jobs import Follower

    with jobs.open_journal() as journal:
        operation, follower = journal.operation(job), Follower(journal, job)
        try:
            if operation.kind == _PROTECT and operation.active:
                _watch_protection(follower, operation.guest, inventory, json=json)
            elif json:
                view = follow(follower, _print_news)
                end = {"kind": "ended", "outcome": view.operation.outcome, "job": view.as_json()}
                output.print_json(end, line=True)
            else:
                with Window(output.err.is_terminal) as window:
                    view = follow(follower, window.take)
                output.out.print(ended(view))
        except KeyboardInterrupt:
            output.say(f"stopped watching; {follower.id} continues")
            raise typer.Exit(130) from None


def _watch_protection(
    follower: "Follower", guest: str, inventory: Path | None, *, json: bool
) -> None:
    # These modules are loaded only for a protection.
    from vmckpt.app import protection
    from vmckpt.app.controller import load_inventory
    from vmckpt.cli import watch_protection

    known = load_inventory(inventory)

    def take(told: watch_protection.Told) -> None:
        if json:
            output.print_json(told.as_json(), line=True)
        else:
            output.say(f"{told.at:7.1f}s {watch_protection.line(told.look)}")

    # All queries share one event loop, so that the end of a query does not wait for silent hosts.
    with asyncio.Runner() as runner:
        why = watch_protection.follow(
            follower,
            lambda one: runner.run(protection.job_status(known, one, at_once=True)),
            take,
            output.say,
        )
    if json:
        view = follower.look().view
        ending = {"outcome": view.operation.outcome, "why": why, "job": view.as_json()}
        output.print_json({"kind": "ended", **ending}, line=True)
    else:
        output.out.print(f"{follower.id} {guest}: {why}")


def follow(follower: "Follower", take: "Callable[[News], None]") -> "JobView":
    """Follow a job until it ends. Returns its final state.

    Raises OrphanedJobs if the job has no live controller.
    """
    while True:
        news = follower.look()
        take(news)
        if not news.view.operation.active:
            if not news.events and not news.samples:
                return news.view
            continue  # each call of look() returns a limited number of events
        if news.view.unattended:
            raise nobody(news.view)
        time.sleep(_LOOK_EVERY)


def nobody(view: "JobView") -> OrphanedJobs:
    """Return the error for an orphaned job."""
    last = view.operation.controller
    # A controller that gives up an operation leaves process 0.
    what = f"was process {last.pid} on" if last.pid else "gave up the job on"
    return OrphanedJobs(
        f"{view.operation.id} is orphaned; its last controller {what} {last.host}",
        hint="run vmckpt guests to see where guests are running, then run vmckpt recover",
    )


def ended(view: "JobView") -> str:
    """Return one line that describes how a job ended."""
    operation = view.operation
    took = (operation.ended_at or operation.began_at) - operation.began_at
    error = (operation.report or {}).get("error")
    line = f"{operation.id} {operation.guest}: {view.doing} after {show_seconds(took)}"
    return f"{line}: {error}" if error else line


class Window:
    """Shows the progress of a job: a panel on a terminal, or at most one line per second."""

    def __init__(self, terminal: bool) -> None:
        self._live: Live | None = None
        self._view: JobView | None = None
        self._parts: Sequence[JobView] = ()
        self._steps: Sequence[StoredStep] = ()
        self._last: Sampled | None = None
        self._logged = -_LOG_EVERY
        if terminal:
            self._live = Live(
                get_renderable=self._panel, console=output.err, refresh_per_second=4, transient=True
            )

    def __enter__(self) -> "Window":
        if self._live is not None:
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

    def take(self, news: "News") -> None:
        first = self._view is None
        self._view = news.view
        self._parts, self._steps = news.parts, news.steps
        # At the first call, only the latest of the earlier samples is shown.
        samples = news.samples[-1:] if first or self._live else news.samples
        lines = [(event.at, wording.event(event.kind, event.values)) for event in news.events]
        lines += [(sample.at, self._sampled(sample)) for sample in samples]
        lines += self._moving(news.view.operation)
        for at, text in sorted(lines, key=lambda line: line[0]):
            if text is not None:
                output.say(f"{at:7.1f}s {text}")

    def _sampled(self, sample: StoredSample) -> str | None:
        """Store a sample. Returns its log line.

        Returns None on a terminal, or within `_LOG_EVERY` seconds of the last line.
        """
        self._last = serialization.as_sampled(sample)
        if self._live is not None or sample.at - self._logged < _LOG_EVERY:
            return None
        self._logged = sample.at
        return progress.line(self._last)

    def _moving(self, operation: Operation) -> list[tuple[Seconds, str | None]]:
        """Return a log line on an evacuation's moves.

        Empty without moves, on a terminal, or within `progress.LOG_EVERY` seconds of the last line.
        """
        at, rows = Seconds(time.time() - operation.began_at), progress.rows_of(self._parts)
        if not rows or self._live is not None or at - self._logged < progress.LOG_EVERY:
            return []
        self._logged = at
        return [(at, f"{self._there(operation)}; {progress.rows_line(rows)}")]

    def _there(self, operation: Operation) -> str:
        found = evacuation_progress.turns(operation, self._parts, self._steps)
        return f"{evacuation_progress.summary(found).arrived} of {len(found)} arrived"

    def _panel(self) -> Group:
        if self._view is None:
            return Group()
        operation = self._view.operation
        elapsed = Seconds((operation.ended_at or time.time()) - operation.began_at)
        if operation.kind in WHOLE_HOST:
            title = f"{operation.id} {operation.way}"
            rows = progress.rows_of(self._parts)
            return progress.rows_panel(title, self._there(operation), elapsed, rows)
        title = f"{operation.id} {operation.guest} → {operation.target or '?'}"
        return progress.panel(title, self._view.doing, elapsed, self._last)


def _print_news(news: "News") -> None:
    lines = [(event.at, event.as_json()) for event in news.events]
    lines += [(sample.at, {"kind": "sampled", **sample.as_json()}) for sample in news.samples]
    for _, line in sorted(lines, key=lambda line: line[0]):
        output.print_json(line, line=True)
