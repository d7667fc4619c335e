"""Every cell of the large tables: each fault at each moment of a migration, and whatever is asked
for while something else is under way; and what else is too long for ./check --all.

    sudo .venv/bin/python -m bench.tables [--json bench/results/tables.json] [--only faults,others]

All are tried side by side, each in a lab of its own; more than an hour on 2 cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

TABLES = {
    "faults": ["tests/faults"],
    "locking": ["tests/lab/test_locking.py"],
    "others": ["tests/lab", "--ignore=tests/lab/test_locking.py", "-m", "campaign"],
}


def found(report: Path) -> dict[str, Any]:
    """What pytest has written down: how many cells, what failed, and how long the slowest took."""
    cells = list(ET.parse(report).iter("testcase"))
    failed = [one for one in cells if any(child.tag in ("failure", "error") for child in one)]
    skipped = sum(one.find("skipped") is not None for one in cells)
    return {
        "cells": len(cells),
        "passed": len(cells) - len(failed) - skipped,
        "failed": [one.get("name") for one in failed],
        "seconds": round(sum(float(one.get("time", 0)) for one in cells)),
        "slowest_s": max((float(one.get("time", 0)) for one in cells), default=None),
    }


def main() -> None:
    """Try them and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(TABLES), help="some of " + ", ".join(TABLES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        reports = {name: Path(folder, f"{name}.xml") for name in args.only.split(",")}
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                 f"--junit-xml={report}", *TABLES[name]],
            )
            for name, report in reports.items()
        ]  # fmt: skip
        for one in running:
            one.wait()
        results: dict[str, Any] = {name: found(report) for name, report in reports.items()}
    results["took_s"] = round(time.monotonic() - began)
    text = json.dumps(results, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    sys.exit(any(results[name]["failed"] for name in reports))


if __name__ == "__main__":
    main()
