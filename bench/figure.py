"""Figures of the benchmarks: each next to its physical limit and the best competing program. Pure.

A result file (bench/results) contains the figures of one run, the versions of the programs that ran
in turn, and the raw measurements.
"""

import statistics
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of docs/figures.md. All values of a row have the same unit."""

    what: str
    unit: str
    ours: float
    limit: float | None = None
    limit_is: str = ""
    peer: float | None = None
    """The best value of any competing program or variant; None: there is none."""
    peer_is: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a benchmark measured in one run."""

    figures: tuple[Figure, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the programs that ran in turn with vmckpt."""
    raw: Any = None

    def as_json(self, machine: Mapping[str, Any]) -> dict[str, Any]:
        """Return the contents of a result file."""
        return {
            "machine": dict(machine), "versions": dict(self.versions),
            "figures": [asdict(one) for one in self.figures], "raw": self.raw,
        }  # fmt: skip


def best(of: Mapping[str, float | None], *, most: bool = False) -> tuple[float | None, str]:
    """Return the lowest value and its name; `most`: the highest. (None, "") if all are None."""
    known = {name: value for name, value in of.items() if value is not None}
    if not known:
        return None, ""
    name = (max if most else min)(known, key=lambda one: known[one])
    return known[name], name


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there are none."""
    known = [one for one in values if one is not None]
    return statistics.median(known) if known else None


def shown(value: float, unit: str) -> str:
    """Return a value with three significant digits and its unit.

    >>> shown(0.01234, "s"), shown(1234.5, "MB/s"), shown(3.0, "ms")
    ('0.0123 s', '1,234 MB/s', '3.00 ms')
    """
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.995 else 3
    if 0 < size < 0.0995:
        digits = 4 if size >= 0.00995 else 5
    return f"{value:,.{digits}f} {unit}"


def times(ratio: float) -> str:
    """Return a ratio with three significant digits; below a tenth, in percent."""
    if ratio < 0.1:
        return f"{100 * ratio:.2g} %"
    return f"{ratio:,.{0 if ratio >= 100 else 1 if ratio >= 10 else 2}f} ×"


def row(figure: Mapping[str, Any]) -> str:
    """Return a figure as a line of a Markdown table."""
    cells = [figure["what"], shown(figure["ours"], figure["unit"])]
    for key in ("limit", "peer"):
        other = figure[key]
        if other is None:
            cells += ["–", ""]
            continue
        cells += [
            f"{shown(other, figure['unit'])} ({figure[key + '_is']})",
            times(figure["ours"] / other) if other else "",
        ]
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| | vmckpt | limit | ratio | best competing program | ratio |",
    "|---|--:|--:|--:|--:|--:|",
)


def table(result: Mapping[str, Any] | None) -> list[str]:
    """Return the lines of a section's table; of a result that is None: not measured."""
    if result is None:
        return ["*Not measured.*"]
    machine = result["machine"]
    told = [f"{name} {what}" for name, what in sorted(result["versions"].items())]
    told.append(f"{machine['cores']} cores with a load of {machine['load']:.1f} before the run")
    return [*HEAD, *map(row, result["figures"]), "", *wrapped(f"With {', '.join(told)}.")]


def wrapped(text: str) -> list[str]:
    """Return a paragraph in lines of at most 128 characters."""
    return textwrap.wrap(text, 128, break_long_words=False, break_on_hyphens=False)
