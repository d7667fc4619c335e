"""Run the tests that are too long for ./check --all, including every cell of the large tables.

The tables are: each fault at each moment of a migration (faults), and each request while another
operation is in progress (locking).

    sudo .venv/bin/python -m bench.tables [--json bench/results/tables.json] [--only faults,others]

The groups run concurrently, each in its own lab. This takes more than an hour on 2 cores.
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
    """Read pytest's report. Returns the number of cells, the failures and the durations."""
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
    """Run the groups, print the results and save them."""
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
