"""Charts drawn with characters."""

from collections.abc import Sequence
from typing import Any

from rich.text import Text
from textual.app import RenderResult
from textual.widget import Widget

from vmckpt_tui.screens.migration_view import Lines, Points

_LEAST = 20
"""Minimum width of a readable chart, in columns."""


class Chart(Widget):
    """A chart that fills its container."""

    DEFAULT_CSS = "Chart { height: 1fr; width: 1fr; }"

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002  # Textual's word
        super().__init__(id=id)
        self._lines: Lines | None = None

    def show(self, lines: Lines) -> None:
        """Set the data."""
        if lines != self._lines:
            self._lines = lines
            self.refresh()

    def render(self) -> RenderResult:
        """Return the chart; a note without two samples; nothing if the widget is too small."""
        lines, size = self._lines, self.size
        if lines is None or len(lines.solid[0]) < 2:
            return Text("no samples yet", style="dim")
        if size.width < _LEAST or size.height < 4:
            return Text("")
        drawn = _drawn(lines, size.width, size.height - 1)
        return Text.assemble((f"{lines.title} ({lines.unit})\n", "bold"), drawn)


def _drawn(lines: Lines, width: int, height: int) -> Text:
    # Imported with the first chart, so that the import does not delay the start.
    import plotext  # type: ignore[import-untyped]  # noqa: PLC0415

    plot: Any = plotext
    plot.clear_figure()
    plot.theme("clear")
    plot.plotsize(width, height)
    for edge in lines.band or ():
        plot.plot(*edge, marker="dot")
    if lines.dotted is not None and len(lines.dotted[0]) > 1:
        plot.plot(*lines.dotted, marker="dot")
    plot.plot(*lines.solid, marker="braille")
    most = max(_highest(one) for one in _every(lines))
    plot.ylim(0, most or 1)
    ticks = _ticks(most or 1)
    plot.yticks(ticks, [f"{one:,.0f}" for one in ticks])
    last = max(one[0][-1] for one in _every(lines))
    plot.xticks([0, last / 2, last], ["0", _short(last / 2), f"{_short(last)} s"])
    plot.frame(False)
    return Text.from_ansi(plot.build())


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}"


def _every(lines: Lines) -> Sequence[Points]:
    found = [lines.solid, *(lines.band or ())]
    return [*found, lines.dotted] if lines.dotted is not None else found


def _highest(points: Points) -> float:
    return max(points[1], default=0.0)


def _ticks(most: float) -> Sequence[float]:
    """Return two or three round numbers from 0 to at most `most`; 0 and 1 if `most` is below 1."""
    step = 10 ** len(str(int(most / 2 or 1))) / 10
    nice = max(1, int(most / 2 / step)) * step
    return [0, nice, 2 * nice] if 2 * nice <= most else [0, nice]
