"""What commands begun from here have said."""

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widget import Widget
from textual.widgets import Static

from vmckpt_tui.columns import Cell, Column
from vmckpt_tui.grid import Grid
from vmckpt_tui.running import Run, Runs

_LINES = 1000
"""The last ones are shown: to draw all of them anew takes a while."""


def _columns() -> Sequence[Column[Run]]:
    def state(run: Run) -> Cell:
        if not run.over:
            return "▶ runs", "bold"
        return ("✓ done", "good") if run.code == 0 else (f"✗ exit {run.code}", "bad")

    return (
        Column(label="", width=10, cell=state),
        Column(label="command", width=30, grows=1, cell=lambda one: (one.title, "")),
    )


class OutputPane(Vertical):
    """The commands, and what the chosen one says."""

    name_of: ClassVar[str] = "Output"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("i", "interrupt", "Interrupt")]
    DEFAULT_CSS = """
    OutputPane Grid { height: auto; max-height: 40%; min-height: 3; }
    OutputPane VerticalScroll { height: 1fr; padding: 0 1; background: $panel; }
    """

    def __init__(self, runs: Runs) -> None:
        super().__init__(id="pane-output")
        self._runs = runs
        self._seen = ""

    def compose(self) -> ComposeResult:
        yield Grid(_columns(), lambda one: str(one.number),
                   empty="nothing was begun from here yet")  # fmt: skip
        with VerticalScroll():
            yield Static("", markup=False)

    def main(self) -> Widget:
        return self.query_one(Grid)

    def fill(self) -> None:
        """New output; the last lines are in sight unless somebody reads further up."""
        grid: Grid[Run] = self.query_one(Grid)
        grid.show(self._runs.all[::-1])
        grid.styles.height = min(len(self._runs.all) + 1, 8)
        self._read()

    def _read(self) -> None:
        run: Run | None = self.query_one(Grid).current
        text = "" if run is None else "\n".join(run.text.splitlines()[-_LINES:])
        if text == self._seen:
            return
        self._seen = text
        scroll = self.query_one(VerticalScroll)
        down = scroll.scroll_offset.y >= scroll.max_scroll_y - 1
        self.query_one(Static).update(Text.from_ansi(text))
        if down:
            scroll.scroll_end(animate=False)

    def on_grid_moved(self) -> None:
        self._read()

    def action_interrupt(self) -> None:
        """As Ctrl-C does: what is under way is left clean, and says so."""
        run: Run | None = self.query_one(Grid).current
        if run is not None and not run.over:
            run.begun[-1].stop()
