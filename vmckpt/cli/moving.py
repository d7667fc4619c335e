"""The moves of a job of a whole host that are on their way: a panel, or a line of a log."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vmckpt.journal import serialization, wording
from vmckpt.model.events import Sampled
from vmckpt.units import Seconds, show_bytes, show_rate, show_seconds

if TYPE_CHECKING:
    from vmckpt.journal.jobs import JobView

LOG_EVERY = 10.0
_SHOWN = 10
"""So many at once are shown; more say nothing more."""


@dataclass(frozen=True, slots=True)
class Row:
    """One guest on its way."""

    guest: str
    target: str
    sampled: Sampled

    @property
    def left(self) -> str:
        """How long it will still take, in words."""
        estimate = self.sampled.estimate
        return wording.left(estimate.low, estimate.high, converging=estimate.converging)


def rows_of(parts: "Iterable[JobView]") -> list[Row]:
    """Those migrations of a job that run and have been measured."""
    return [
        Row(one.operation.guest, one.operation.target or "?", serialization.as_sampled(one.sample))
        for one in parts
        if one.operation.active and one.sample is not None
    ]


def panel(title: str, doing: str, elapsed: Seconds, rows: list[Row]) -> Group:
    """What a terminal shows; fits into 80 columns."""
    head = Table.grid(padding=(0, 2))
    head.add_row(Text(title, "bold"), doing, show_seconds(elapsed))
    grid = Table.grid(padding=(0, 2))
    for row in rows[:_SHOWN]:
        sample = row.sampled.sample
        grid.add_row(
            f"{row.guest} → {row.target}",
            ProgressBar(total=1.0, completed=row.sampled.done, width=16),
            f"{show_bytes(sample.remaining)} left",
            show_rate(sample.bandwidth),
            row.left,
        )
    more = [Text(f"and {len(rows) - _SHOWN} more")] if len(rows) > _SHOWN else []
    return Group(head, grid, *more)


def line(rows: list[Row]) -> str:
    """The same in a line."""
    shown = [f"{row.guest} → {row.target} {row.sampled.done:.0%} ({row.left})" for row in rows]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return f"on their way: {', '.join(shown[:_SHOWN])}{more}"
