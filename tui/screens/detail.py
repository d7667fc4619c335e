"""The detail screens: a migration, a job for a whole host, and a protection."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.css.query import NoMatches
from textual.screen import Screen
from textual.widgets import Sparkline, Static

from vmckpt.app.dashboard_source import Source
from vmckpt.errors import VmckptError
from vmckpt.journal.evacuation_progress import Turn, summary, turns
from vmckpt.journal.jobs import JobDetail, JobView
from vmckpt.units import show_bytes, show_rate, show_seconds
from vmckpt_tui.actions import Model, Scene, Where
from vmckpt_tui.panes import bindings
from vmckpt_tui.screens import evacuation_view, migration_view, protection_view
from vmckpt_tui.screens.migration_view import Pass, Told
from vmckpt_tui.screens.protection_view import EpochMark
from vmckpt_tui.tables import Column
from vmckpt_tui.widgets.basic import Facts, Keys
from vmckpt_tui.widgets.chart import Chart
from vmckpt_tui.widgets.data_grid import Grid

_BACK = Binding("escape,q", "app.pop_screen", "Back")
_BEATS = 300
"""Maximum number of samples kept. Each status that differs from the last adds a sample."""
_FEW = 60
"""Minimum width of a sparkline, in samples."""
_SERIES: dict[str, tuple[str, Callable[[float], str]]] = {
    "behind_s": ("behind (RPO)", show_seconds),
    "pause_s": ("pause", show_seconds),
    "bytes": ("sent per epoch", show_bytes),
}
"""Label and formatter of each sparkline, by the field of EpochMark."""


def _since(samples: int) -> str:
    """Return the period that the samples cover."""
    return "since this screen was opened" if samples < _BEATS else f"in the last {_BEATS} samples"


class Detail(Screen[None]):
    """A screen that polls its object while it is open."""

    where: ClassVar[Where]
    every: ClassVar[float] = 0.5
    DEFAULT_CSS = """
    Detail #title { height: 1; background: $primary; color: $text; text-style: bold;
                    padding: 0 1; }
    Detail #wrong { height: auto; color: $text-error; padding: 0 1; display: none; }
    Detail #wrong.some { display: block; }
    """

    def __init__(self, source: Source, model: Model) -> None:
        super().__init__()
        self.source, self.model = source, model

    def on_mount(self) -> None:
        self.run_worker(self._watch())

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            try:
                wrong = await self._looked()
                self.query_one("#wrong", Static).update(wrong)
                self.query_one("#wrong").set_class(bool(wrong), "some")
            except NoMatches:  # the screen was closed meanwhile
                return
            self.refresh_bindings()
            # Sources that answer slowly are polled less often.
            await asyncio.sleep(max(self.every, 4 * (time.monotonic() - began)))

    async def _looked(self) -> str:
        try:
            await self.look()
        except (VmckptError, OSError) as exc:
            return f"✗ {exc}"
        return ""

    async def look(self) -> None:
        """Fetch and display new data. Raises VmckptError, OSError."""

    def show(self, model: Model) -> None:
        """Set the newest data of the dashboard."""
        self.model = model

    def scene(self) -> Scene:
        return Scene(where=self.where, model=self.model)

    def title_is(self, text: str) -> None:
        self.query_one("#title", Static).update(Text(text, overflow="ellipsis", no_wrap=True))


def _told_columns() -> Sequence[Column[Told]]:
    return (
        Column(label="at", width=9, right=True,
               cell=lambda one: (show_seconds(one.at), "dim")),
        Column(label="decisions and reasons", width=20, grows=1,
               cell=lambda one: (one.text, one.tone)),
    )  # fmt: skip


def _pass_columns() -> Sequence[Column[Pass]]:
    return (
        Column(label="pass", width=4, right=True, cell=lambda one: (str(one.number), "")),
        Column(label="lasted", width=7, right=True,
               cell=lambda one: (show_seconds(one.lasted), "")),
        Column(label="sent", width=8, right=True, from_width=40,
               cell=lambda one: (show_bytes(one.sent), "")),
        Column(label="left", width=8, right=True, cell=lambda one: (show_bytes(one.left), "")),
        Column(label="dirty rate", width=11, right=True, from_width=50,
               cell=lambda one: ("–" if one.dirty is None else show_rate(one.dirty), "")),
        Column(label="bandwidth", width=11, right=True, from_width=64,
               cell=lambda one: (show_rate(one.bandwidth), "")),
    )  # fmt: skip


class MoveScreen(Detail):
    """The screen of a migration: its convergence and its decisions."""

    where = Where.MOVE
    every = 0.4
    BINDINGS: ClassVar[list[BindingType]] = [_BACK, *bindings(Where.MOVE)]
    DEFAULT_CSS = """
    MoveScreen #charts { height: 1fr; min-height: 6; max-height: 20; }
    MoveScreen #below { height: 1fr; min-height: 5; }
    MoveScreen #passes { width: 2fr; }
    MoveScreen #story { width: 3fr; }
    """

    def __init__(self, source: Source, model: Model, job: str) -> None:
        super().__init__(source, model)
        self._job = job
        self._detail: JobDetail | None = None

    def compose(self) -> ComposeResult:
        yield Static(self._job, id="title", markup=False)
        yield Static("", id="wrong", markup=False)
        yield Facts()
        with Horizontal(id="charts"):
            yield Chart(id="remaining")
            yield Chart(id="rates")
        with Horizontal(id="below"):
            yield Grid(_pass_columns(), lambda one: str(one.number), id="passes",
                       empty="no pass yet")  # fmt: skip
            yield Grid(_told_columns(), lambda one: f"{one.at} {one.text}", id="story",
                       empty="no decisions yet")  # fmt: skip
        yield Keys()

    async def look(self) -> None:
        """Fetch and display the new events and samples. Raises VmckptError, OSError."""
        if self._detail is None:
            self._detail = await self.source.job(self._job)
            self.query_one("#story").focus()
        elif self._detail.view.operation.active:
            last = self._detail
            events, samples = last.events, last.samples
            news = await self.source.news(
                self._job, events[-1].seq if events else 0, samples[-1].seq if samples else 0
            )
            self._detail = migration_view.followed(last, news)
            if not news.view.operation.active:  # includes the report and the answers to requests
                self._detail = await self.source.job(self._job)
        self._draw(self._detail)

    def _draw(self, detail: JobDetail) -> None:
        one = detail.view.operation
        took = migration_view.elapsed(detail, time.time())
        done = f" · {detail.samples[-1].done:.0%}" if detail.samples and one.active else ""
        self.title_is(f"{one.id} {one.guest}: {one.way} · {detail.view.doing}{done} · {took}")
        self.query_one(Facts).show(migration_view.facts(detail))
        self.query_one("#rates", Chart).show(migration_view.rates(detail.samples))
        left = migration_view.remaining(detail.samples, detail.forecast)
        self.query_one("#remaining", Chart).show(left)
        self.query_one("#passes", Grid).show(migration_view.passes(detail.samples))
        story: Grid[Told] = self.query_one("#story", Grid)
        lines = migration_view.story(detail)
        # The cursor follows new lines only if it is on the last line.
        newest = story.current is None or story.current is story.rows[-1]
        if list(lines) != list(story.rows):
            story.show(lines)
            if newest:
                story.action_move(1_000_000)

    def scene(self) -> Scene:
        detail = self._detail
        if detail is None:
            return Scene(where=self.where, model=self.model)
        last = detail.samples[-1] if detail.samples else None
        return Scene(
            where=self.where, model=self.model, job=detail.view,
            done=None if last is None else last.done,
            remaining=None if last is None else last.values.get("remaining"),
        )  # fmt: skip


class DrainScreen(Detail):
    """The screen of a job for a whole host: guests that have arrived, are moving or are waiting."""

    where = Where.DRAIN
    every = 1.0
    BINDINGS: ClassVar[list[BindingType]] = [_BACK, *bindings(Where.DRAIN)]
    DEFAULT_CSS = """
    DrainScreen #facts { height: auto; max-height: 5; padding: 0 1; }
    DrainScreen #loads { height: auto; max-height: 30%; padding: 0 1; }
    DrainScreen #turns { height: 2fr; }
    DrainScreen #story { height: 1fr; min-height: 3; }
    """

    def __init__(self, source: Source, model: Model, job: str) -> None:
        super().__init__(source, model)
        self._job = job
        self._view: JobView | None = None
        self._turns: Sequence[Turn] = ()

    def compose(self) -> ComposeResult:
        yield Static(self._job, id="title", markup=False)
        yield Static("", id="wrong", markup=False)
        yield Static("", id="facts", markup=False)
        with VerticalScroll(id="loads"):
            yield Static("", id="bars", markup=False)
        yield Grid(evacuation_view.turn_columns(), lambda one: one.guest, id="turns",
                   empty="no guests to move")  # fmt: skip
        yield Grid(_told_columns(), lambda one: f"{one.at} {one.text}", id="story",
                   empty="no decisions yet")  # fmt: skip
        yield Keys()

    async def look(self) -> None:
        """Fetch and display the job and its migrations. Raises VmckptError, OSError."""
        first = self._view is None
        detail = await self.source.job(self._job)
        parts = await self.source.parts(self._job)
        self._view, one = detail.view, detail.view.operation
        self._turns = turns(one, parts, detail.steps)
        self.title_is(f"{one.id} {one.way} · {detail.view.doing}")
        facts = evacuation_view.facts(one, self._turns, time.time())
        self.query_one("#facts", Static).update("\n".join(facts))
        bars = evacuation_view.loads(self.model.fleet, one, self._turns)
        self.query_one("#bars", Static).update("\n".join(bars))
        self.query_one("#turns", Grid).show(self._turns)
        story = self.query_one("#story", Grid)
        story.show(migration_view.story(detail))
        if first:
            self.query_one("#turns").focus()

    def on_grid_chosen(self, event: "Grid.Chosen") -> None:
        turn = self.query_one("#turns", Grid).current
        if event.grid.id == "turns" and turn is not None and turn.view is not None:
            move = MoveScreen(self.source, self.model, turn.view.operation.id)
            self.app.push_screen(move)

    def scene(self) -> Scene:
        done = summary(self._turns).done if self._turns else None
        return Scene(where=self.where, model=self.model, job=self._view, done=done)


def _without_agents(view: JobView) -> str:
    """Return the state of a protection that is not delegated to agents."""
    one = view.operation
    if not one.active:
        report = one.report or {}
        return f"ended: {report.get('why') or report.get('error') or view.doing}"
    if view.unattended:
        return "orphaned: its controller is gone; run vmckpt recover"
    return f"{view.doing}, by process {one.controller.pid} on {one.controller.host}"


class GuardScreen(Detail):
    """The screen of a protection: the lag of the standby, and the cost of an epoch."""

    where = Where.PROTECTION
    every = 1.0
    BINDINGS: ClassVar[list[BindingType]] = [_BACK, *bindings(Where.PROTECTION)]
    DEFAULT_CSS = """
    GuardScreen .strip { height: auto; padding: 0 1; }
    GuardScreen Sparkline { height: 3; margin: 0 1; }
    """

    def __init__(self, source: Source, model: Model, job: str) -> None:
        super().__init__(source, model)
        self._job, self._entry = job, model.protections.get(job)
        self._beats: list[EpochMark] = []

    def compose(self) -> ComposeResult:
        yield Static(self._job, id="title", markup=False)
        yield Static("", id="wrong", markup=False)
        with VerticalScroll():
            yield Facts()
            yield Static("", id="epoch", classes="strip", markup=False)
            for name in _SERIES:
                yield Static("", id=f"of-{name}", classes="strip", markup=False)
                yield Sparkline([], id=name, summary_function=max)
        yield Keys()

    async def look(self) -> None:
        """Display the protection's status from the model. Raises VmckptError, OSError."""
        found = self.model.protections.get(self._job)
        if found is None:
            view = (await self.source.job(self._job)).view
            self.title_is(f"{self._job}: {_without_agents(view)}")
            self._entry = None
            return
        if found is not self._entry or not self._beats:
            self._entry = found
            self._draw(found)

    async def _looked(self) -> str:
        wrong = await super()._looked()
        old = self.model.trouble.get("protections")
        return wrong or (f"✗ the status shown is outdated: {old}" if old else "")

    def _draw(self, entry: Mapping[str, Any]) -> None:
        self.title_is(f"{self._job} {entry['guest']}: {entry['primary']} → {entry['backup']}")
        self.query_one(Facts).show(protection_view.rows(entry))
        width = max(10, self.size.width - 4)
        legend = "  ".join(
            f"{bar[:1]} {name} {took}" for name, bar, took in protection_view.parts(entry, 10)
        )
        self.query_one("#epoch", Static).update(
            f"epoch: ─ guest runs  {legend}\n{protection_view.strip(entry, width)}"
        )
        beat = protection_view.beat(entry)
        if beat is not None:
            self._beats = [*self._beats, beat][-_BEATS:]
        for name, (label, show) in _SERIES.items():
            values = [float(getattr(one, name)) for one in self._beats]
            if not values:
                continue
            least, most = show(min(values)), show(max(values))
            told = f"{label}: {show(values[-1])}, {least} to {most} {_since(len(values))}"
            self.query_one(f"#of-{name}", Static).update(told)
            # Padding keeps the time scale constant from the first sample on.
            self.query_one(f"#{name}", Sparkline).data = [0.0] * (_FEW - len(values)) + values

    def scene(self) -> Scene:
        return Scene(where=self.where, model=self.model, entry=self._entry)
