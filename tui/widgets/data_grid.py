"""A table that draws only its visible rows, so that 20,000 rows are as fast as 20."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click, Resize
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from vmckpt_tui.tables import TONES, Column

T = TypeVar("T")
_GAP = 2


class Grid(ScrollView, Generic[T], can_focus=True):
    """A table with a cursor, marks and a sort order. A row keeps its key when its data changes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "move(-1000000)", "First", show=False),
        Binding("end", "move(1000000)", "Last", show=False),
        Binding("space", "mark", "Mark", show=False),
        Binding("enter", "choose", "Open", show=False),
        Binding("left_square_bracket", "sort(-1)", "Sort", show=False),
        Binding("right_square_bracket", "sort(1)", "Sort", show=False),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "grid--head", "grid--cursor", "grid--marked", *(f"grid--{tone}" for tone in TONES)
    }  # fmt: skip
    DEFAULT_CSS = """
    Grid { height: 1fr; scrollbar-size-vertical: 1; overflow-x: hidden; }
    Grid .grid--head { text-style: bold underline; color: $text-muted; }
    Grid .grid--cursor { background: $surface-lighten-2; }
    Grid:focus .grid--cursor { background: $primary; color: $text; text-style: bold; }
    Grid .grid--marked { text-style: bold; color: $accent; }
    Grid .grid--good { color: $text-success; }
    Grid .grid--warn { color: $text-warning; }
    Grid .grid--bad { color: $text-error; text-style: bold; }
    Grid .grid--dim { color: $text-muted; }
    Grid .grid--bold { text-style: bold; }
    """

    class Moved(Message):
        """Sent when the cursor or the marks have changed."""

        def __init__(self, grid: "Grid[Any]") -> None:
            super().__init__()
            self.grid = grid

        @property
        def control(self) -> "Grid[Any]":
            return self.grid

    class Chosen(Moved):
        """Sent when a row is opened by Enter or a double click."""

    def __init__(
        self,
        columns: Sequence[Column[T]],
        key: Callable[[T], str],
        *,
        id: str | None = None,  # noqa: A002  # Textual's word
        empty: str = "nothing",
        sort: int | None = None,
        marks: bool = False,
    ) -> None:
        """Create an empty table. `sort`: index of a column. `marks`: whether rows can be marked."""
        super().__init__(id=id)
        self._columns, self._key, self._empty = tuple(columns), key, empty
        self._all: Sequence[T] = ()
        self._rows: Sequence[T] = ()
        self._widths: list[tuple[Column[T], int]] = []
        self._at = 0
        self._sort, self._down = sort, False
        self._marks = marks
        self.marked: set[str] = set()

    @property
    def rows(self) -> Sequence[T]:
        """The rows in the order in which they are shown."""
        return self._rows

    @property
    def current(self) -> T | None:
        return self._rows[self._at] if self._at < len(self._rows) else None

    @property
    def selected(self) -> tuple[T, ...]:
        """The marked rows; if none is marked, the row under the cursor."""
        if self.marked:
            found = tuple(one for one in self._rows if self._key(one) in self.marked)
            if found:
                return found
        current = self.current
        return () if current is None else (current,)

    def show(self, rows: Sequence[T], *, empty: str | None = None) -> None:
        """Set new rows; the cursor stays on its row. `empty`: text shown if there are no rows."""
        kept = self.current
        self._empty = self._empty if empty is None else empty
        self._all = rows
        if self.marked:
            # A row that has disappeared or is filtered out loses its mark, even if it returns.
            self.marked &= {self._key(one) for one in rows}
        self._order(None if kept is None else self._key(kept))

    def point_at(self, key: str) -> None:
        """Move the cursor to the row with this key."""
        self._seat(key)
        self.refresh()

    def _order(self, key: str | None) -> None:
        column = None if self._sort is None else self._columns[self._sort]
        if column is not None and column.order is not None:
            self._rows = sorted(self._all, key=column.order, reverse=self._down)  # type: ignore[arg-type]
        else:
            self._rows = self._all
        before = self._at
        self._seat(key)
        self.virtual_size = Size(self.size.width, len(self._rows) + 1)
        self.refresh()
        if before != self._at or key is None:
            self.post_message(self.Moved(self))

    def _seat(self, key: str | None) -> None:
        last = max(0, len(self._rows) - 1)
        there = self._at < len(self._rows) and self._key(self._rows[self._at]) == key
        if key is not None and not there:
            found = next((at for at, one in enumerate(self._rows) if self._key(one) == key), None)
            self._at = self._at if found is None else found
        self._at = min(self._at, last)

    def on_resize(self, event: Resize) -> None:
        self._lay_out(event.size.width)
        self.virtual_size = Size(event.size.width, len(self._rows) + 1)

    def _lay_out(self, width: int) -> None:
        """Compute the widths of the columns that are shown at this width."""
        shown = [one for one in self._columns if width >= one.from_width]
        fixed = sum(one.width for one in shown) + _GAP * max(0, len(shown) - 1) + 2
        shares = sum(one.grows for one in shown)
        rest = max(0, width - fixed)
        self._widths = [
            (one, one.width + (rest * one.grows // shares if shares else 0)) for one in shown
        ]

    def render_line(self, y: int) -> Strip:
        """Return one line of the screen; line 0 is the header, which does not scroll."""
        width = self.size.width
        if not self._widths:
            self._lay_out(width)
        if y == 0:
            return self._head(width)
        at = y - 1 + round(self.scroll_offset.y)
        plain = self.rich_style
        if at >= len(self._rows):
            text = f"  {self._empty}" if not self._rows and y == 1 else ""
            return Strip([Segment(set_cell_size(text, width), plain)], width)
        return self._row(at, width)

    def _head(self, width: int) -> Strip:
        style = self.get_component_rich_style("grid--head")
        parts = ["  "]
        for column, size in self._widths:
            sorted_by = self._sort is not None and self._columns[self._sort] is column
            label = column.label + ((" ▾" if self._down else " ▴") if sorted_by else "")
            parts += [_fitted(label, size, right=column.right), " " * _GAP]
        text = "".join(parts[:-1])
        return Strip([Segment(set_cell_size(text, width), style)], width)

    def _row(self, at: int, width: int) -> Strip:
        row = self._rows[at]
        marked = self._key(row) in self.marked
        base = self.rich_style
        if marked:
            base += self.get_component_rich_style("grid--marked", partial=True)
        here = at == self._at
        over = self.get_component_rich_style("grid--cursor", partial=True) if here else Style.null()
        pointer = "›" if here and self.has_focus else " "
        segments = [Segment(pointer + ("●" if marked else " "), base + over)]
        for column, size in self._widths:
            text, tone = column.cell(row)
            style = base
            if tone:
                style += self.get_component_rich_style(f"grid--{tone}", partial=True)
            segments.append(
                Segment(_fitted(text, size, right=column.right) + " " * _GAP, style + over)
            )
        return Strip(segments).adjust_cell_length(width, base + over)

    def action_move(self, by: int) -> None:
        self._go(self._at + by)

    def action_page(self, by: int) -> None:
        self._go(self._at + by * max(1, self.size.height - 2))

    def _go(self, at: int) -> None:
        at = max(0, min(at, len(self._rows) - 1))
        if at != self._at:
            self._at = at
            self._follow()
            self.refresh()
            self.post_message(self.Moved(self))

    def _follow(self) -> None:
        """Scroll so that the cursor is visible."""
        height = max(1, self.size.height - 1)
        top = round(self.scroll_offset.y)
        if self._at < top:
            self.scroll_to(y=self._at, animate=False)
        elif self._at >= top + height:
            self.scroll_to(y=self._at - height + 1, animate=False)

    def action_mark(self) -> None:
        if self._marks and (row := self.current) is not None:
            self.marked ^= {self._key(row)}
            self._go(self._at + 1)
            self.refresh()
            self.post_message(self.Moved(self))

    def unmark(self) -> None:
        """Clear all marks."""
        self.marked.clear()
        self.refresh()
        self.post_message(self.Moved(self))

    def action_choose(self) -> None:
        if self._rows:
            self.post_message(self.Chosen(self))

    def action_sort(self, by: int) -> None:
        """Sort by the next or previous column; past the last or first, reverse the order."""
        able = [at for at, one in enumerate(self._columns) if one.order is not None]
        if not able:
            return
        where = able.index(self._sort) + by if self._sort in able else 0
        self._sort_by(able[where % len(able)], down=self._down ^ (where not in range(len(able))))

    def _sort_by(self, column: int, *, down: bool) -> None:
        kept = self.current
        self._sort, self._down = column, down
        self._order(None if kept is None else self._key(kept))
        self._follow()

    def on_click(self, event: Click) -> None:
        if event.y == 0:
            self._click_head(event.x)
            return
        at = event.y - 1 + round(self.scroll_offset.y)
        if at < len(self._rows):
            again = at == self._at and event.chain > 1
            self._go(at)
            if again:
                self.action_choose()

    def _click_head(self, x: int) -> None:
        left = 2
        for column, size in self._widths:
            if left <= x < left + size and column.order is not None:
                at = self._columns.index(column)
                self._sort_by(at, down=at == self._sort and not self._down)
                return
            left += size + _GAP


def _fitted(text: str, size: int, *, right: bool) -> str:
    """Pad or truncate a text to exactly `size` terminal cells, for characters of any width.

    `right`: align to the right.
    """
    text = text.translate(_STEERING)
    length = cell_len(text)
    if length > size:
        return set_cell_size(text, max(0, size - 1)) + "…" if size else ""
    return " " * (size - length) + text if right else text + " " * (size - length)


# Characters that would control the terminal, break the line, or change the writing direction of
# the text after them.
_STEERING = {
    one: "�"
    for first, last in (
        (0, 0x1F), (0x7F, 0x9F), (0x61C, 0x61C), (0x200B, 0x200F), (0x2028, 0x202E),
        (0x2066, 0x2069), (0xFEFF, 0xFEFF), (0xD800, 0xDFFF),
    )
    for one in range(first, last + 1)
}  # fmt: skip
