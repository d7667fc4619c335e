"""Write the tables of docs/figures.md from bench/results.

    python -m bench.figures [--check]

A table is between the lines `<!-- figures NAME -->` and `<!-- end -->`, and comes from
bench/results/NAME.json. `--check` changes nothing, and fails if the page is out of date.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.figure import table

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs/figures.md", ROOT / "bench/results"
_PART = re.compile(r"(<!-- figures (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def stored(name: str) -> Mapping[str, Any] | None:
    """Return the results of a benchmark; None if it has not run."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def written(page: str, result_of: Callable[[str], Mapping[str, Any] | None]) -> str:
    """Return the page with the tables of these results."""

    def part(found: re.Match[str]) -> str:
        lines = "\n".join(table(result_of(found[2])))
        return f"{found[1]}\n{lines}\n\n{found[3]}"

    return _PART.sub(part, page)


def names(page: str) -> list[str]:
    """Return the benchmarks whose figures a page shows."""
    return [found[2] for found in _PART.finditer(page)]


def main() -> None:
    """Write the page, or check it."""
    before = PAGE.read_text()
    after = written(before, stored)
    if "--check" in sys.argv[1:]:
        if after != before:
            raise SystemExit("docs/figures.md is out of date; run python -m bench.figures")
        return
    PAGE.write_text(after)


if __name__ == "__main__":
    main()
