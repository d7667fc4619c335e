"""Break safety-critical lines one at a time: the tests must catch each.

    .venv/bin/python -m bench.mutations [NAME | AREA ...] [-j 2] [--list]
        [--json bench/results/mutations.json]

Each mutation in the table breaks one line in a copy of the tree, and the unit tests for this line
run. Only tests with fixed examples count. The test that failed is run once more with the mutation
and once without it, so that no mutation counts as caught by chance.

Exit status: 0 if all are caught, 1 if one is not, 2 if the table is out of date.
"""

import argparse
import json
import os
import platform
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.mutations.mutation import Mutation, OutOfDate, chosen
from bench.mutations.runner import GOOD, Outcome, try_all
from bench.mutations.scratch import WrongCode
from bench.mutations.table import TABLE

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Try the mutations, print a table and save the results. Returns the exit status."""
    options = argparse.ArgumentParser(prog="bench.mutations", description=__doc__.split("\n")[0])
    options.add_argument("what", nargs="*", help="names or areas; default: all")
    options.add_argument("-j", "--processes", type=int, default=os.cpu_count() or 1)
    options.add_argument("--json", type=Path)
    options.add_argument("--list", action="store_true", help="only print the table")
    given = options.parse_args()
    try:
        table = chosen(TABLE, given.what)
    except ValueError as exc:
        options.error(str(exc))
    if given.list:
        for one in table:
            print(f"{one.area:<19} {one.name:<38} {one.file}\n{'':<19} {one.breaks}")
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):  # background jobs of a shell ignore SIGINT
        signal.signal(number, signal.default_int_handler)
    try:
        found = try_all(table, ROOT, max(1, given.processes), _tell, _Progress(len(table)))
    except (OutOfDate, WrongCode) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if given.json is not None:
        _keep(given.json, found)
    return _summary(found)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Progress:
    """Prints a row for each result."""

    def __init__(self, count: int) -> None:
        self._count, self._ended = count, 0

    def __call__(self, one: Outcome) -> None:
        self._ended += 1
        where, name = f"{self._ended}/{self._count}", one.mutation.name
        told = f"{where:>7} {name:<38} {one.verdict:<8} {one.seconds:5.1f} s  {_short(one.by)}"
        print(told, flush=True)


def _short(test: str) -> str:
    return test.removeprefix("tests/unit/").replace("test_", "", 1)[:110]


def _summary(found: Sequence[Outcome]) -> int:
    bad = [one for one in found if one.verdict not in GOOD]
    areas = Counter(str(one.mutation.area) for one in found)
    print(f"{len(found) - len(bad)} of {len(found)} mutations are caught, in {len(areas)} areas")
    for one in bad:
        print(f"{one.verdict}: {one.mutation.name} ({one.mutation.file}): {one.mutation.breaks}")
    return 1 if bad else 0


def _keep(path: Path, found: Sequence[Outcome]) -> None:
    """Save the results. Keeps rows of the file for other mutations that are still in the table."""
    rows: dict[str, dict[str, Any]] = {}
    if path.exists():
        rows = {row["name"]: row for row in json.loads(path.read_text())["mutations"]}
    rows |= {one.mutation.name: _row(one.mutation, one) for one in found}
    kept = [rows[one.name] for one in TABLE if one.name in rows]
    told = {
        "python": platform.python_version(),
        "caught": sum(row["verdict"] in GOOD for row in kept), "of": len(TABLE),
        "areas": Counter(row["area"] for row in kept), "mutations": kept,
    }  # fmt: skip
    path.write_text(json.dumps(told, indent=1) + "\n")


def _row(mutation: Mutation, one: Outcome) -> dict[str, Any]:
    return {
        "name": mutation.name, "area": mutation.area, "file": mutation.file,
        "verdict": one.verdict, "by": one.by, "seconds": round(one.seconds, 1),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
