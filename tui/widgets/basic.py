"""Small widgets that several screens share."""

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.events import Click, Resize
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Footer, Input, Static
from textual.widgets._footer import FooterKey

from vmckpt.model.guest import MEND
from vmckpt_tui.actions import Model


class Head(Horizontal):
    """The line at the top: the parts of the dashboard, and the title."""

    DEFAULT_CSS = """
    Head { height: 1; background: $panel; }
    Head Tab { width: auto; padding: 0 1; }
    Head Tab.here { background: $primary; text-style: bold; color: $text; }
    Head #brand { width: auto; padding: 0 1; text-style: bold; color: $accent; }
    Head #state { width: 1fr; text-align: right; padding: 0 1; color: $text-muted; }
    """

    _HELP = "? help"

    def __init__(self, names: Sequence[str], title: str) -> None:
        super().__init__()
        self._names, self._title = names, title
        self._here, self._counts = "", dict[str, str]()

    def compose(self) -> ComposeResult:
        yield Static("vmckpt", id="brand")
        for number, name in enumerate(self._names, 1):
            yield Tab(number, name)
        yield TextLine(self._titled(), id="state")

    def _titled(self) -> str:
        return f"{self._title} · {self._HELP}" if self._title else self._HELP

    def show(self, here: str, counts: dict[str, str]) -> None:
        """Highlight the visible part. `counts`: text after each part's name."""
        self._here, self._counts = here, counts
        self._fit(self.size.width)

    def on_resize(self, event: Resize) -> None:
        # Texts that change during a layout are not laid out again.
        self.call_after_refresh(self._fit, event.size.width)

    def _fit(self, width: int) -> None:
        """Show the names of all parts; if they do not fit, only the numbers of hidden parts."""
        tabs = [*self.query(Tab)]
        texts = {
            tab: f"{tab.number} {tab.name_of}{self._counts.get(tab.name_of, '')}" for tab in tabs
        }
        tight = 0 < width < sum(len(text) + 2 for text in texts.values())  # 0: not laid out yet
        self.set_class(tight, "-tight")
        for tab, text in texts.items():
            here = tab.name_of == self._here
            tab.set_class(here, "here")
            tab.say(
                text if here or not tight else f"{tab.number}{self._counts.get(tab.name_of, '')}"
            )
        self.query_one("#state", TextLine).say(self._HELP if tight else self._titled())


class TextLine(Static):
    """A line of text that is laid out again only if the text changes."""

    def __init__(self, text: str = "", *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(text, id=id, markup=False)
        self._said = text

    def say(self, text: str) -> None:
        """Set the text."""
        if text != self._said:
            self._said = text
            self.update(Text(text, overflow="ellipsis", no_wrap=True))


class Tab(TextLine):
    """The name of a part of the dashboard. A click shows that part."""

    class Wanted(Message):
        """Sent when the tab is clicked."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.part = name

    def __init__(self, number: int, name: str) -> None:
        super().__init__(f"{number} {name}")
        self.number, self.name_of = number, name

    def on_click(self, event: Click) -> None:
        event.stop()
        self.post_message(self.Wanted(self.name_of))


class Trouble(TextLine):
    """One line for each guest with two copies and each failed source; hidden if there are none."""

    DEFAULT_CSS = """
    Trouble { height: auto; max-height: 3; padding: 0 1; background: $error 20%; display: none; }
    Trouble.some { display: block; }
    """

    def show(self, model: Model) -> None:
        """Display the problems of a model."""
        lines = [f"✗ two copies: {one.text}; {MEND}" for one in model.copies]
        lines += [f"✗ {what}: {why}" for what, why in sorted(model.trouble.items())]
        self.set_class(bool(lines), "some")
        self.say("\n".join(lines))


class Filter(Input):
    """The input field for words that rows must contain."""

    DEFAULT_CSS = """
    Filter { height: 1; border: none; padding: 0 1; display: none; background: $surface; }
    Filter:focus { border: none; }
    Filter.open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave(True)", "Clear"),
        Binding("enter,down", "leave(False)", "To the list"),
    ]

    class Left(Message):
        """Sent when the field loses the focus to the list."""

    def open(self) -> None:
        """Show and focus the field."""
        self.add_class("open")
        self.focus()

    def action_leave(self, clear: bool) -> None:
        if clear:
            self.value = ""
        self.set_class(bool(self.value), "open")
        self.post_message(self.Left())


class Facts(Widget):
    """Pairs of name and value, in up to three columns."""

    DEFAULT_CSS = "Facts { height: auto; padding: 0 1; }"
    _LEAST = 38
    """Minimum width of a column."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002  # Textual's word
        super().__init__(id=id)
        self._rows: Sequence[tuple[str, str]] = ()

    def show(self, rows: Sequence[tuple[str, str]]) -> None:
        """Set the pairs of name and value."""
        if rows != self._rows:
            again = len(rows) != len(self._rows)
            self._rows = rows
            self.refresh(layout=again)

    def render(self) -> Text:
        """Return the pairs, column by column."""
        width = max(1, self.size.width)
        columns = max(1, min(3, width // self._LEAST))
        lines = -(-len(self._rows) // columns)
        each = width // columns
        text = Text(no_wrap=True, overflow="ellipsis")
        for line in range(lines):
            for name, value in self._rows[line::lines]:
                start = len(text)
                text.append(f"{name} ", "dim")
                text.append(" ".join(value.split()))
                _pad(text, start, each)
            text.append("\n")
        text.rstrip()
        return text

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        columns = max(1, min(3, width // self._LEAST))
        return -(-len(self._rows) // columns)


def _pad(text: Text, start: int, size: int) -> None:
    """Pad or truncate the text after `start` to `size` characters, including a gap."""
    part = text[start:]
    part.truncate(size - 1, overflow="ellipsis", pad=True)
    text.right_crop(len(text) - start)
    text.append_text(part)
    text.append(" ")


class Keys(Footer):
    """The footer. It is rebuilt only if its keys have changed."""

    def __init__(self) -> None:
        super().__init__(show_command_palette=False)
        self._shown: tuple[tuple[Binding, bool], ...] | None = None

    def compose(self) -> ComposeResult:
        for part in super().compose():
            if isinstance(part, FooterKey):
                # Each key starts compact; changing this later would style each key again.
                part.set_reactive(FooterKey.compact, self.compact)
            yield part

    async def recompose(self) -> None:
        """Rebuild the footer if its keys have changed. Textual calls this on every focus change."""
        active = self.screen.active_bindings.values()
        shown = tuple((one.binding, one.enabled) for one in active if one.binding.show)
        if shown != self._shown:
            self._shown = shown
            await super().recompose()
