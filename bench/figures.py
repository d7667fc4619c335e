"""Write the tables of docs/figures.md from bench/results.

    python -m bench.figures [--check]

A table is between the lines `<!-- figures NAME -->` and `<!-- end -->`, and comes from
bench/results/NAME.json. `<!-- summary -->` begins the table of README.md, which has some of the
figures. `--check` changes nothing, and fails if a page is out of date.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.figure import HEAD, row, table

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "docs/figures.md", ROOT / "README.md")
RESULTS = ROOT / "bench/results"
SUMMARY = {
    "migration of a busy guest of 1 GiB over 1 Gbit/s": ("migration", "1GiB", ": total"),
    "snapshot of a guest's memory and files, per core": ("stores", "first snapshot", "per core"),
    "power-off of a protected guest's host to its first answer": ("failover", "power-off", ""),
    "pause per epoch, guest of 4 GiB": ("epochs", "pause per epoch", "4GiB"),
    "plan of an evacuation, 500 hosts with 10,000 guests": ("plans", "500 hosts", ""),
}
"""Rows of README.md: the benchmark, and the beginning and end of the figure's name."""
Source = Callable[[str], Mapping[str, Any] | None]
_PART = re.compile(r"(<!-- figures (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SUMMARY = re.compile(r"(<!-- summary -->\n).*?(<!-- end -->)", re.DOTALL)


def stored(name: str) -> Mapping[str, Any] | None:
    """Return the results of a benchmark; None if it has not run."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def written(page: str, result_of: Source) -> str:
    """Return the page with the tables of these results."""

    def part(found: re.Match[str]) -> str:
        lines = "\n".join(table(result_of(found[2])))
        return f"{found[1]}\n{lines}\n\n{found[3]}"

    def short(found: re.Match[str]) -> str:
        rows = summary(result_of)
        lines = [*HEAD, *rows] if rows else []
        return "\n".join([found[1].rstrip("\n"), *lines, found[2]])

    return _SUMMARY.sub(short, _PART.sub(part, page))


def summary(result_of: Source) -> list[str]:
    """Return the rows of SUMMARY whose benchmarks have run."""
    rows = []
    for text, (name, begins, ends) in SUMMARY.items():
        result = result_of(name) or {"figures": []}
        for one in result["figures"]:
            if one["what"].startswith(begins) and one["what"].endswith(ends):
                rows.append(row({**one, "what": text}))
                break
    return rows


def names(page: str) -> list[str]:
    """Return the benchmarks whose figures a page shows."""
    return [found[2] for found in _PART.finditer(page)]


def main() -> None:
    """Write the pages, or check them."""
    for path in PAGES:
        before = path.read_text()
        after = written(before, stored)
        if after != before:
            if "--check" in sys.argv[1:]:
                raise SystemExit(f"{path.name} is out of date; run python -m bench.figures")
            path.write_text(after)


if __name__ == "__main__":
    main()
