"""The help screen and the command palette, both built from the table of actions."""

from collections.abc import Iterable
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from vmckpt_tui import actions
from vmckpt_tui.action_lists.all import TABLE
from vmckpt_tui.actions import Action, Scene, Where

GENERAL = (
    ("1 … 7", "switch to a view (or click its name)"),
    ("↑ ↓ PgUp PgDn", "move the cursor (or use k and j)"),
    ("Enter", "open the row under the cursor"),
    ("Space", "mark a row; actions apply to all marked rows"),
    ("/", "filter by words; Esc clears the filter"),
    ("[ ]", "sort by the previous or next column (or click its header)"),
    ("Tab", "switch between hosts and guests"),
    ("Ctrl+P", "search all actions by name"),
    ("?", "show this help"),
    ("Esc", "go back"),
    ("q", "quit; running commands continue"),
)
_NAMES = {
    Where.FLEET: "Fleet: hosts and guests",
    Where.JOBS: "Jobs",
    Where.MOVE: "One migration",
    Where.DRAIN: "One evacuation",
    Where.PROTECTION: "Replication",
    Where.SNAPSHOTS: "Snapshots",
    Where.POLICIES: "Policies",
    Where.DOCTOR: "Doctor",
}


def page(scene: Scene | None) -> Iterable[tuple[str, list[tuple[str, str, str]]]]:
    """Yield the title and rows of each part: key, help, and why the action is unavailable. Pure."""
    order = sorted(_NAMES, key=lambda where: scene is None or where is not scene.where)
    for where in order:
        rows = []
        for one in actions.of(TABLE, where):
            why = ""
            if scene is not None and scene.where is where:
                why = actions.why_not(one, scene) or ""
            rows.append((one.key, one.help, why))
        yield _NAMES[where], rows


class Help(ModalScreen[None]):
    """The help screen: all keys, those of the current part first."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark", "dismiss", "Back")]
    DEFAULT_CSS = """
    Help { align: center middle; }
    Help VerticalScroll { width: 96%; max-width: 100; height: 94%; padding: 0 1;
                          background: $surface; border: round $primary; }
    """

    def __init__(self, scene: Scene | None) -> None:
        super().__init__()
        self._scene = scene

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = "Keys"
            yield Static(_table([(key, text, "") for key, text in GENERAL]))
            for title, rows in page(self._scene):
                yield Static(Text(f"\n{title}", style="bold"))
                yield Static(_table(rows))

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()


def _table(rows: list[tuple[str, str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=14, justify="right", style="bold")
    table.add_column(ratio=1)
    for key, text, why in rows:
        told = Text(text)
        if why:
            told.append(f"  (not available: {why})", "dim")
        table.add_row(Text(key), told)
    return table


class Actions(Provider):
    """The available actions, for the command palette."""

    def _fitting(self) -> Iterable[tuple[Action, str]]:
        scene: Scene | None = getattr(self.app, "scene", lambda: None)()
        for one in TABLE:
            if scene is not None and actions.why_not(one, scene) is None:
                yield one, f"{one.label}: {one.help}"

    async def discover(self) -> Hits:
        """Yield all available actions."""
        for one, text in self._fitting():
            yield DiscoveryHit(text, self._doing(one), text=text, help=f"key {one.key}")

    async def search(self, query: str) -> Hits:
        """Yield the available actions that match the query."""
        matcher = self.matcher(query)
        for one, text in self._fitting():
            if (score := matcher.match(text)) > 0:
                yield Hit(score, matcher.highlight(text), self._doing(one), text=text)

    def _doing(self, action: Action) -> "DoAction":
        return DoAction(self, action.name)


class DoAction:
    """A callable that starts an action."""

    def __init__(self, provider: Provider, name: str) -> None:
        self._provider, self._name = provider, name

    async def __call__(self) -> None:
        await self._provider.app.run_action(f"do('{self._name}')")
