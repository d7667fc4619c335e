"""Commands that were started from the dashboard, and their output."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widget import Widget
from textual.widgets import Static

from vmckpt.model.events import Begun, Commands, Said
from vmckpt_tui.actions import Words, line
from vmckpt_tui.tables import Cell, Column
from vmckpt_tui.widgets.data_grid import Grid


@dataclass(slots=True)
class Run:
    """A sequence of commands, which stops at the first command that fails."""

    number: int
    words: tuple[Words, ...]
    begun: list[Begun] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)

    @property
    def title(self) -> str:
        more = f" and {len(self.words) - 1} more" if len(self.words) > 1 else ""
        return f"{line(self.words[0])}{more}"

    @property
    def over(self) -> bool:
        if not self.said or self.said[-1].code is None:
            return False
        return self.said[-1].code != 0 or len(self.said) == len(self.words)

    @property
    def code(self) -> int | None:
        """Exit code of the last command; None while the sequence is running."""
        return self.said[-1].code if self.over else None

    @property
    def text(self) -> str:
        """The output of all commands, each below its command line."""
        told = []
        for words, said in zip(self.words, self.said, strict=False):
            end = "" if said.code is None else f"\n[exit code {said.code}]"
            told.append(f"$ {line(words)}\n{said.text.rstrip()}{end}")
        return "\n\n".join(told)

    @property
    def last_line(self) -> str:
        """The last error line of the output, or its last line; a summary for the notification."""
        lines = [one for one in self.said[-1].text.splitlines() if one.strip()]
        errors = [one for one in lines if one.startswith("error:")]
        return (errors or lines or [""])[-1].strip()

    @property
    def pids(self) -> Sequence[int]:
        return [one.pid for one in self.begun]


class Runs:
    """All sequences of commands that were started from the dashboard."""

    def __init__(self, commands: Commands, width: int = 100) -> None:
        self._commands, self._width = commands, width
        self.all: list[Run] = []

    @property
    def active(self) -> Sequence[Run]:
        return [one for one in self.all if not one.over]

    @property
    def waiting(self) -> int:
        """Number of queued commands, which never start if this process exits."""
        return sum(len(one.words) - len(one.begun) for one in self.active)

    def begin(self, words: tuple[Words, ...]) -> Run:
        """Start the first of the commands. Raises OSError."""
        run = Run(number=len(self.all) + 1, words=words)
        self._next(run)
        self.all.append(run)
        return run

    def _next(self, run: Run) -> None:
        begun = self._commands.start(run.words[len(run.begun)], self._width)
        run.begun.append(begun)
        run.said.append(Said(text="", code=None))

    def look(self) -> Sequence[Run]:
        """Read new output and start the next commands. Returns the sequences that have ended."""
        ended = []
        for run in self.active:
            run.said[-1] = run.begun[-1].said()
            if run.over:
                ended.append(run)
            elif run.said[-1].code == 0:
                try:
                    self._next(run)
                except OSError as exc:
                    run.said.append(Said(text=f"error: cannot start the command: {exc}", code=1))
                    ended.append(run)
        return ended


_LINES = 1000
"""Maximum number of output lines shown, as redrawing all lines would be slow."""


def _columns() -> Sequence[Column[Run]]:
    def state(run: Run) -> Cell:
        if not run.over:
            return "▶ running", "bold"
        return ("✓ done", "good") if run.code == 0 else (f"✗ exit {run.code}", "bad")

    return (
        Column(label="", width=10, cell=state),
        Column(label="command", width=30, grows=1, cell=lambda one: (one.title, "")),
    )


class OutputPane(Vertical):
    """The list of commands, and the output of the selected one."""

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
                   empty="no command has been started from the dashboard yet")  # fmt: skip
        with VerticalScroll():
            yield Static("", markup=False)

    def main(self) -> Widget:
        return self.query_one(Grid)

    def fill(self) -> None:
        """Show new output. Scrolls to the end unless the user has scrolled up."""
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
        """Interrupt the selected command, like Ctrl-C; the command cleans up before it exits."""
        run: Run | None = self.query_one(Grid).current
        if run is not None and not run.over:
            run.begun[-1].stop()
