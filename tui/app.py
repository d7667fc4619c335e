"""The dashboard application: its parts, its polling and its key bindings."""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.widgets import ContentSwitcher

from vmckpt.app.dashboard_source import Source
from vmckpt.errors import VmckptError
from vmckpt.journal.jobs import JobView
from vmckpt.model.events import Commands
from vmckpt.policy.model import Policy
from vmckpt_tui import actions
from vmckpt_tui.action_lists.all import BY_NAME, TABLE
from vmckpt_tui.actions import Action, Model, Scene, Where, Words, is_move, is_whole
from vmckpt_tui.command_output import OutputPane, Run, Runs
from vmckpt_tui.panes import (
    DoctorPane,
    FleetPane,
    GuardPane,
    JobsPane,
    Pane,
    PoliciesPane,
    SnapshotsPane,
)
from vmckpt_tui.screens.confirm import Order
from vmckpt_tui.screens.detail import Detail, DrainScreen, GuardScreen, MoveScreen
from vmckpt_tui.screens.help import Actions, Help
from vmckpt_tui.widgets.basic import Filter, Head, Keys, Tab, Trouble
from vmckpt_tui.widgets.data_grid import Grid

T = TypeVar("T")
_ENDED = 200
"""Maximum number of ended jobs in the list."""
_PARTS = ("Fleet", "Jobs", "Replicas", "Snapshots", "Policies", "Doctor", "Output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Polling intervals of the sources, in seconds. Slow sources are polled less often."""

    jobs: float = 0.5
    past: float = 5.0
    fleet: float = 5.0
    guard: float = 2.0
    snapshots: float = 60.0
    share: float = 0.1
    """Maximum share of the time that may be spent on polling one source."""
    longest: float = 10.0
    """Limit of the pause that `share` causes: a source may be slow because a host has just died."""

    def pause(self, every: float, took: float) -> float:
        """Return the pause before the next poll, in seconds. `took`: duration of the last poll."""
        return max(every, min(took / self.share, self.longest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Configuration of a dashboard."""

    source: Source
    commands: Commands
    policies: Sequence[Policy] = ()
    wrong_policies: str | None = None
    """Errors in policy files. Until they are fixed, no policy can be selected for a migration."""
    read_only: bool = False
    here: str = ""
    """Name of this machine in the journal."""
    pace: Pace = Pace()


class Dashboard(App[None]):
    """The application: polls the source and shows the data in its parts and screens."""

    TITLE = "vmckpt"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS: ClassVar[set[Any]] = App.COMMANDS | {Actions}
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"go('{name}')", name, show=False)
            for number, name in enumerate(_PARTS, 1)
        ),
        Binding("slash", "search", "Filter"),
        Binding("question_mark", "keys", "Help"),
        Binding("q", "quit", "Quit"),
    ]
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012  # as Textual declares it
        (0, "narrow"), (90, "middle"), (130, "wide")
    ]  # fmt: skip
    CSS = """
    .narrow #brand, .narrow #state, .middle #state { display: none; }
    Head.-tight #state { display: block; }
    ContentSwitcher { height: 1fr; }
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._setting = setting
        names = tuple(one.name for one in setting.policies)
        wrong = setting.wrong_policies
        self.model = Model(
            policies=names, read_only=setting.read_only,
            trouble={} if wrong is None else {"policies": wrong},
        )  # fmt: skip
        self.runs = Runs(setting.commands)
        self._opens: set[int] = set()
        """PIDs of commands whose jobs are opened once they appear in the journal."""
        self._footer: tuple[object, ...] = ()
        self._warned = False
        self._looked_back = -self._setting.pace.past

    def compose(self) -> ComposeResult:
        yield Head(_PARTS, self._setting.source.title)
        yield Trouble()
        with ContentSwitcher(initial="pane-fleet"):
            yield FleetPane()
            yield JobsPane()
            yield GuardPane()
            yield SnapshotsPane()
            yield PoliciesPane(self._setting.policies)
            yield DoctorPane(self._setting.commands)
            yield OutputPane(self.runs)
        yield Keys()

    def on_mount(self) -> None:
        pace, source = self._setting.pace, self._setting.source
        self._go("Fleet")
        self._poll("hosts", pace.fleet, source.fleet, lambda it: replace(self.model, fleet=it))
        self._poll("journal", pace.jobs, self._jobs, lambda it: replace(self.model, jobs=it))
        self._poll(
            "protections", pace.guard, source.protections,
            lambda it: replace(self.model, protections=it),
        )  # fmt: skip
        self._poll(
            "snapshots", pace.snapshots, source.snapshots,
            lambda it: replace(self.model, snapshots=it),
        )  # fmt: skip
        self.set_interval(0.3, self._look_at_runs)

    async def on_unmount(self) -> None:
        await self._setting.source.close()

    def _poll(
        self, name: str, every: float, ask: Callable[[], Awaitable[T]], keep: Callable[[T], Model]
    ) -> None:
        async def loop() -> None:
            while True:
                began, wrong = time.monotonic(), None
                try:
                    made = keep(await ask())
                except (VmckptError, OSError) as exc:
                    made, wrong = self.model, str(exc)
                took = time.monotonic() - began
                others = {key: why for key, why in self.model.trouble.items() if key != name}
                made = replace(made, trouble=others if wrong is None else {**others, name: wrong})
                if made != self.model:
                    self.model = made
                    self._show()
                await asyncio.sleep(self._setting.pace.pause(every, took))

        self.run_worker(loop(), group=name)

    async def _jobs(self) -> Sequence[JobView]:
        """Return all jobs. Ended jobs are read again only every `Pace.past` seconds, or when a job
        ends."""
        now, ask = time.monotonic(), self._setting.source.jobs
        active = [one for one in await ask(0) if one.operation.active]
        self._open_begun(active)
        ids = {one.operation.id for one in active}
        ended = {one.operation.id for one in self.model.active} - ids
        if ended or now - self._looked_back >= self._setting.pace.past:
            self._looked_back = now
            return await ask(_ENDED)
        return [*active, *(one for one in self.model.jobs if not one.operation.active)]

    def _show(self) -> None:
        """Update the visible widgets from the model."""
        if not self.is_running:
            return
        model = self.model
        jobs = sum(not one.operation.controller.entrusted for one in model.active)
        guarded = len(model.protections)
        late = sum(one.unattended for one in model.jobs)
        counts = {
            "Jobs": f" {jobs}{'!' if late else ''}" if jobs else "",
            "Replicas": f" {guarded}" if guarded else "",
            "Output": f" {len(self.runs.active)}▶" if self.runs.active else "",
        }
        for screen in self.screen_stack:
            if isinstance(screen, Detail):
                screen.show(model)
        base = self.screen_stack[0]
        base.query_one(Head).show(self._here, counts)
        base.query_one(Trouble).show(model)
        if self.screen is base and isinstance(pane := self.pane, Pane):
            pane.show(model)
            self._keys_again()

    def _keys_again(self) -> None:
        """Redraw the footer if the available actions have changed."""
        scene = self.scene()
        able = () if scene is None else tuple(
            actions.why_not(one, scene) is None for one in actions.of(TABLE,
                                                                   scene.where)
        )  # fmt: skip
        if (self._here, able) != self._footer:
            self._footer = (self._here, able)
            self.refresh_bindings()

    @property
    def pane(self) -> Pane | OutputPane:
        """The visible part."""
        switcher = self.screen_stack[0].query_one(ContentSwitcher)
        shown = switcher.visible_content
        assert isinstance(shown, Pane | OutputPane)
        return shown

    @property
    def _here(self) -> str:
        return self.pane.name_of

    def scene(self) -> Scene | None:
        """Return the selection that an action would apply to; None if there is no selection."""
        screen = next(
            (one for one in reversed(self.screen_stack) if not isinstance(one, CommandPalette)),
            self.screen,
        )
        if isinstance(screen, Detail):
            return replace(screen.scene(), model=self.model)
        if screen is not self.screen_stack[0] or not isinstance(pane := self.pane, Pane):
            return None
        return replace(pane.scene(), model=self.model)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether a key's action is available now; if not, Textual disables the key."""
        if action == "search":
            return self.screen is self.screen_stack[0] and bool(self.pane.query(Filter))
        if action != "do":
            return True
        scene, wanted = self.scene(), BY_NAME.get(str(parameters[0]))
        return scene is not None and wanted is not None and actions.why_not(wanted, scene) is None

    def action_go(self, part: str) -> None:
        if self.screen is self.screen_stack[0]:
            self._go(part)

    def _go(self, part: str) -> None:
        base = self.screen_stack[0]
        base.query_one(ContentSwitcher).current = f"pane-{part.lower()}"
        pane = self.pane
        pane.main().focus()
        if isinstance(pane, OutputPane):
            pane.fill()
        self._show()

    def on_tab_wanted(self, message: Tab.Wanted) -> None:
        self._go(message.part)

    def action_search(self) -> None:
        if isinstance(pane := self.pane, Pane) and self.screen is self.screen_stack[0]:
            pane.search()

    async def action_quit(self) -> None:
        """Quit. If commands are still queued, warn first and quit on the second request."""
        waiting = self.runs.waiting
        if waiting and not self._warned:
            self._warned = True
            self.notify(
                f"commands still queued: {waiting}; they will not run if you quit; press q again to"
                " quit",
                severity="warning",
            )
            return
        self.exit()

    def action_keys(self) -> None:
        self.push_screen(Help(self.scene()))

    def on_grid_moved(self, _: Grid.Moved) -> None:
        # Messages still arrive while the application closes, when no screen is left.
        if self.is_running:
            self._keys_again()

    def on_grid_chosen(self, _: Grid.Chosen) -> None:
        if not self.is_running:
            return
        if isinstance(self.pane, JobsPane | GuardPane) and self.screen is self.screen_stack[0]:
            self._open(self.scene())

    def action_do(self, name: str) -> None:
        """Start an action of the table: open its dialog, or perform it if it is local."""
        action, scene = BY_NAME[name], self.scene()
        why = "not available here" if scene is None else actions.why_not(action, scene)
        if scene is None or why is not None:
            self.notify(why or "", severity="warning")
            return
        if action.local:
            self._do_local(action, scene)
            return

        def answered(words: tuple[Words, ...] | None) -> None:
            if words:
                self._begin(words)

        self.push_screen(Order(action, scene, self._setting.commands), answered)

    def _do_local(self, action: Action, scene: Scene) -> None:
        if action.name == "look-again":
            self.query_one(DoctorPane).look_again()
        elif action.name == "copy":
            self.run_worker(self._copy(scene))
        else:
            self._open(scene)

    def _open(self, scene: Scene | None) -> None:
        """Open the screen of the selected protection or job."""
        source = self._setting.source
        if scene is not None and scene.entry is not None:
            self.push_screen(GuardScreen(source, self.model, str(scene.entry["job"])))
        elif scene is not None and scene.job is not None:
            self._open_job(scene.job)

    def _open_job(self, view: JobView) -> None:
        """Open the screen of a job, or show its journal record if its kind has no screen."""
        source, one = self._setting.source, view.operation
        if one.id in self.model.protections:
            self.push_screen(GuardScreen(source, self.model, one.id))
        elif is_whole(view):
            self.push_screen(DrainScreen(source, self.model, one.id))
        elif is_move(view):
            self.push_screen(MoveScreen(source, self.model, one.id))
        else:
            scene = Scene(where=Where.JOBS, model=self.model, job=view)
            self.push_screen(Order(BY_NAME["details"], scene, self._setting.commands))

    async def _copy(self, scene: Scene) -> None:
        if scene.job is None:
            return
        try:
            found = await self._setting.source.job(scene.job.operation.id)
        except (VmckptError, OSError) as exc:
            self.notify(str(exc), severity="error", markup=False)
            return
        self.copy_to_clipboard(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
        self.notify(f"{scene.job.operation.id} copied to the clipboard as JSON")

    def _begin(self, words: tuple[Words, ...]) -> None:
        try:
            run = self.runs.begin(words)
        except OSError as exc:
            self.notify(f"cannot start the command: {exc}", severity="error")
            return
        self._opens.update(run.pids)
        self.notify(f"{run.title}", title="started", markup=False)
        self._look_at_runs()

    def _look_at_runs(self) -> None:
        if not (self.runs.active and self.is_running):
            return
        for run in self.runs.look():
            self._tell_end(run)
        if isinstance(pane := self.pane, OutputPane):
            pane.fill()

    def _tell_end(self, run: Run) -> None:
        self._opens.difference_update(run.pids)
        good = run.code == 0
        title = "done" if good else f"exit code {run.code}"
        self.notify(
            f"{run.title}\n{run.last_line}", title=title, markup=False,
            severity="information" if good else "error", timeout=5 if good else 15,
        )  # fmt: skip
        self._show()

    def _open_begun(self, jobs: Sequence[JobView]) -> None:
        """Open the screen of a job that was started here, unless another screen is open by now."""
        for one in jobs:
            by, part = one.operation.controller, "part_of" in one.operation.detail
            mine = by.pid in self._opens and by.host == self._setting.here
            if mine and not part and (is_move(one) or is_whole(one)):
                self._opens.discard(by.pid)
                if self.screen is self.screen_stack[0] and not isinstance(self.focused, Filter):
                    self._open_job(one)


def run(setting: Setting) -> None:
    """Run the dashboard until the user quits."""
    # Warnings on stderr would garble the screen; libvirt's problems are reported as errors.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    Dashboard(setting).run()
