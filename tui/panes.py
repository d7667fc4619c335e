"""The parts of the dashboard that show lists."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widget import Widget
from textual.widgets import Input, Static

from vmckpt.journal.jobs import JobView
from vmckpt.model.events import Commands
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.guest import FleetNow, GuestNow, HostNow
from vmckpt.policy.model import Policy
from vmckpt.units import show_count
from vmckpt_tui import tables as view
from vmckpt_tui.action_lists.all import TABLE
from vmckpt_tui.actions import Model, Scene, Where, of
from vmckpt_tui.screens import protection_view
from vmckpt_tui.tables import Column, Leaf, Use
from vmckpt_tui.widgets.basic import Filter, TextLine
from vmckpt_tui.widgets.data_grid import Grid

_AT_ONCE = 50
"""Number of guests whose policies are determined before key presses are handled again."""


def bindings(where: Where) -> list[BindingType]:
    """Return the key bindings of one part, from the table of actions."""
    return [
        Binding(one.key, f"app.do('{one.name}')", one.label, show=one.shown)
        for one in of(TABLE, where)
    ]


class Pane(Vertical):
    """A part of the dashboard. `show` sets its data; `scene` returns its selection."""

    name_of: ClassVar[str]
    where: ClassVar[Where]

    def __init__(self) -> None:
        super().__init__(id=f"pane-{self.name_of.lower()}")
        self.model = Model()

    def show(self, model: Model) -> None:
        """Set new data and display it."""
        self.model = model
        self.fill()

    def fill(self) -> None:
        """Update the widgets from the model."""

    def scene(self) -> Scene:
        return Scene(where=self.where, model=self.model)

    def main(self) -> Widget:
        """Return the widget that gets the focus."""
        return self.query_one(Grid)

    def search(self) -> None:
        """Open the filter, if the part has one."""
        for one in self.query(Filter):
            one.open()

    def on_filter_left(self) -> None:
        self.main().focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.fill()

    def typed(self) -> str:
        return self.query_one(Filter).value


class FleetPane(Pane):
    """The lists of hosts and guests."""

    name_of = "Fleet"
    where = Where.FLEET
    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings(Where.FLEET),
        Binding("tab", "other", "Hosts/guests", show=False, priority=True),
        Binding("escape", "all", "All", show=False),
    ]
    DEFAULT_CSS = """
    FleetPane #hosts { height: auto; max-height: 35%; min-height: 3; }
    FleetPane #of { height: 1; background: $panel; padding: 0 1; color: $text-muted; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._index = view.index(self.model, 0.0)
        self._host: str | None = None
        self._finder = view.Finder()

    def compose(self) -> ComposeResult:
        hosts: Sequence[Column[HostNow]] = view.host_columns(lambda: self._index)
        guests: Sequence[Column[GuestNow]] = view.guest_columns(lambda: self._index)
        yield Grid(hosts, lambda one: one.name, id="hosts", sort=0, empty="no hosts yet")
        yield TextLine(id="of")
        yield Filter(placeholder="name, host, state or label", id="filter")
        yield Grid(guests, lambda one: f"{one.uuid} {one.host}", id="guests", sort=0, marks=True,
                   empty="loading …")  # fmt: skip

    @property
    def hosts(self) -> "Grid[HostNow]":
        return self.query_one("#hosts", Grid)

    @property
    def guests(self) -> "Grid[GuestNow]":
        return self.query_one("#guests", Grid)

    def main(self) -> Widget:
        return self.guests

    def show(self, model: Model) -> None:
        """Display new data. Guests, up to 20,000, are sorted again only if the fleet changed."""
        known, self.model = self.model.fleet, model
        fleet = model.fleet
        if not known.at or known.hosts is not fleet.hosts or known.guests is not fleet.guests:
            self.fill()
            return
        self._index = view.index(model, time.time(), self._index)
        self.hosts.refresh()
        self.guests.refresh()

    def fill(self) -> None:
        fleet = self.model.fleet
        self._index = view.index(self.model, time.time(), self._index)
        self.hosts.show(fleet.hosts)
        self.hosts.styles.height = min(len(fleet.hosts) + 1, 1 + max(2, self.size.height // 3))
        found = self._finder.matching(fleet.guests, self.typed())
        if self._host is not None:
            found = [one for one in found if one.host == self._host]
        empty = "no guest matches" if self.typed() else "no guests"
        self.guests.show(found, empty=empty if fleet.at else "loading …")
        self._tell(fleet, len(found))

    def on_resize(self) -> None:
        self.fill()

    def _tell(self, fleet: FleetNow, shown: int) -> None:
        on = "" if self._host is None else f" on {self._host} (Esc: all)"
        few = "" if shown == len(fleet.guests) else f"{shown:,} of "
        marked = f", {len(self.guests.marked)} marked" if self.guests.marked else ""
        self.query_one("#of", TextLine).say(
            f"{show_count(len(fleet.hosts), 'host')}"
            f" · {few}{show_count(len(fleet.guests), 'guest')}{on}{marked}"
            " · / filter · Space mark · Tab hosts"
        )

    def scene(self) -> Scene:
        host = self.hosts.current
        if self.hosts.has_focus:
            return Scene(where=self.where, model=self.model, host=host)
        guests = self.guests.selected
        if self.guests.current is not None:  # marked guests may be on other hosts
            host = self.model.host(self.guests.current.host)
        return Scene(where=self.where, model=self.model, guests=guests, host=host)

    def on_grid_moved(self, event: Grid.Moved) -> None:
        self._tell(self.model.fleet, len(self.guests.rows))

    def on_grid_chosen(self, event: "Grid.Chosen") -> None:
        if event.grid is self.hosts and self.hosts.current is not None:
            self._host = self.hosts.current.name
            self.fill()
            self.guests.focus()

    def action_other(self) -> None:
        (self.guests if self.hosts.has_focus else self.hosts).focus()

    def action_all(self) -> None:
        """Clear the selected host, the marks and the filter."""
        self._host = None
        self.guests.unmark()
        self.query_one(Filter).value = ""
        self.fill()


class JobsPane(Pane):
    """The list of jobs, running and ended."""

    name_of = "Jobs"
    where = Where.JOBS
    BINDINGS: ClassVar[list[BindingType]] = bindings(Where.JOBS)

    def compose(self) -> ComposeResult:
        yield Filter(placeholder="guest, host, kind, state or user")
        columns: Sequence[Column[JobView]] = view.job_columns(time.time)
        yield Grid(columns, lambda one: one.operation.id, empty="no job has run yet")

    def fill(self) -> None:
        self.query_one(Grid).show(view.jobs_matching(self.model.jobs, self.typed()))

    def scene(self) -> Scene:
        job: JobView | None = self.query_one(Grid).current
        sample = None if job is None else job.sample
        return Scene(
            where=self.where, model=self.model, job=job,
            done=None if sample is None else sample.done,
            remaining=None if sample is None else sample.values.get("remaining"),
        )  # fmt: skip


class GuardPane(Pane):
    """The list of protections."""

    name_of = "Replicas"
    where = Where.PROTECTION
    BINDINGS: ClassVar[list[BindingType]] = bindings(Where.PROTECTION)

    def compose(self) -> ComposeResult:
        columns: Sequence[Column[Mapping[str, Any]]] = protection_view.guard_columns()
        yield Grid(columns, lambda one: str(one["job"]),
                   empty="no guest is protected; choose a guest in Fleet and press p")  # fmt: skip

    def fill(self) -> None:
        self.query_one(Grid).show(list(self.model.protections.values()))

    def scene(self) -> Scene:
        return Scene(where=self.where, model=self.model, entry=self.query_one(Grid).current)


class SnapshotsPane(Pane):
    """The snapshots of all stores, as a tree for each guest."""

    name_of = "Snapshots"
    where = Where.SNAPSHOTS
    BINDINGS: ClassVar[list[BindingType]] = bindings(Where.SNAPSHOTS)

    def compose(self) -> ComposeResult:
        yield Filter(placeholder="guest, name or store")
        columns: Sequence[Column[Leaf]] = view.snapshot_columns(time.time)
        yield Grid(columns, lambda one: f"{one.snapshot.store} {one.snapshot.id}", marks=True,
                   empty="no snapshots; choose a guest in Fleet and press s")  # fmt: skip

    def fill(self) -> None:
        self.query_one(Grid).show(view.leaves(self.model.snapshots, self.typed()))

    def scene(self) -> Scene:
        found: Sequence[Leaf] = self.query_one(Grid).selected
        chosen = tuple(one.snapshot for one in found)
        return Scene(where=self.where, model=self.model, snapshots=chosen)


class PoliciesPane(Pane):
    """The list of policies, with the number of guests that each applies to."""

    name_of = "Policies"
    where = Where.POLICIES
    BINDINGS: ClassVar[list[BindingType]] = bindings(Where.POLICIES)

    def __init__(self, policies: Sequence[Policy]) -> None:
        super().__init__()
        self._policies = policies
        self._counted: Sequence[GuestNow] | None = None

    def compose(self) -> ComposeResult:
        yield Grid(view.policy_columns(), lambda one: one.policy.name, sort=0,
                   empty="no policy can be read; run vmckpt policy list")  # fmt: skip

    def fill(self) -> None:
        guests = self.model.fleet.guests
        if not self.display or guests is self._counted:
            return
        if self._counted is None:
            self._tell({})
        self._counted = guests
        self.run_worker(self._count(guests), exclusive=True)

    async def _count(self, guests: Sequence[GuestNow]) -> None:
        """Count the guests of each policy, a few at a time, so that keys stay responsive."""
        hosts = {one.name: one for one in self.model.fleet.hosts}
        found: Counter[str] = Counter()
        for at in range(0, len(guests), _AT_ONCE):
            some = guests[at : at + _AT_ONCE]
            found.update(view.chosen(self._policies, one, hosts) for one in some)
            await asyncio.sleep(0.01)
        self._tell({one.name: found[one.name] for one in self._policies})

    def _tell(self, counts: Mapping[str, int]) -> None:
        rows = [Use(policy=one, guests=counts.get(one.name)) for one in self._policies]
        self.query_one(Grid).show(rows)

    def scene(self) -> Scene:
        use: Use | None = self.query_one(Grid).current
        name = None if use is None else use.policy.name
        return Scene(where=self.where, model=self.model, policy=name)

    def on_grid_chosen(self) -> None:
        self.app.run_worker(self.app.run_action("app.do('show-policy')"))


class DoctorPane(Pane):
    """The findings of vmckpt doctor, each with its hint."""

    name_of = "Doctor"
    where = Where.DOCTOR
    BINDINGS: ClassVar[list[BindingType]] = bindings(Where.DOCTOR)
    DEFAULT_CSS = "DoctorPane #hint { height: auto; max-height: 4; padding: 0 1; }"

    def __init__(self, commands: Commands) -> None:
        super().__init__()
        self._commands = commands
        self._asked = False

    def compose(self) -> ComposeResult:
        columns: Sequence[Column[Finding]] = view.finding_columns()
        yield Grid(columns, lambda one: f"{one.where} {one.code} {one.text}", sort=0)
        yield Static("", id="hint", markup=False)

    def fill(self) -> None:
        if not self._asked and self.display:
            self.look_again()

    def look_again(self) -> None:
        """Examine all hosts."""
        self._asked = True
        self.query_one(Grid).show((), empty="examining …")
        self.run_worker(self._examine(), exclusive=True)

    async def _examine(self) -> None:
        grid: Grid[Finding] = self.query_one(Grid)
        try:
            said = await self._commands.ask(["doctor", "--json"], 200)
        except OSError as exc:
            grid.show((), empty=f"cannot run vmckpt doctor: {exc}")
            return
        found = findings(said.text)
        if found is None:
            grid.show((), empty=" ".join(said.text.split()) or "vmckpt doctor printed nothing")
        else:
            grid.show(found, empty="no hosts to examine")

    def on_grid_moved(self) -> None:
        one: Finding | None = self.query_one(Grid).current
        hint = "" if one is None or one.hint is None else f"→ {one.hint}"
        self.query_one("#hint", Static).update(hint)


def findings(text: str) -> Sequence[Finding] | None:
    """Parse the output of `vmckpt doctor --json`. Returns None if it is invalid."""
    start, end = text.find("["), text.rfind("]")
    try:
        told = json.loads(text[start : end + 1])
        return [
            Finding(
                severity=Severity(one["severity"]), code=one["code"], where=one["where"],
                text=one["text"], hint=one["hint"],
            )
            for one in told
        ]  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return None
