"""Run the benchmarks of docs/figures.md one after the other, and write the page.

    bench/all [--quick] [--only migration,snapshots,…]

Each benchmark runs in its own process. It prints the versions of the programs with which it
compares vmckpt, measures them in turn, and writes bench/results/NAME.json. With --quick, everything
is small, and results and page stay unchanged.
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import figures
from bench.figure import Result, row

BENCHES = (
    "migration", "snapshots", "stores", "disks", "epochs", "failover", "processes", "commands",
    "plans", "dashboard", "journal", "evacuation", "forecast",
)  # fmt: skip
"""Modules of this package with a function `measure(quick) -> Result`, the longest-lived first."""


def one(name: str, *, quick: bool) -> None:
    """Run a benchmark in this process, print its figures, and save them unless `quick`."""
    machine = {
        "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
    }  # fmt: skip
    result: Result = importlib.import_module(f"bench.{name}").measure(quick=quick)
    told = result.as_json(machine)
    print(", ".join(f"{name} {what}" for name, what in result.versions.items()))
    print(*map(row, told["figures"]), sep="\n", flush=True)
    if not quick:
        path: Path = figures.RESULTS / f"{name}.json"
        path.write_text(json.dumps(told, indent=1) + "\n")


def several(names: Sequence[str], *, quick: bool) -> list[str]:
    """Run benchmarks in processes of their own. Returns the names of those that failed."""
    failed = []
    for name in names:
        began = time.monotonic()
        print(f"== {name}", flush=True)
        words = [sys.executable, "-m", "bench.run", "--one", name, *(["--quick"] * quick)]
        if subprocess.run(words, check=False).returncode != 0:
            failed.append(name)
        print(f"== {name}: {time.monotonic() - began:.0f} s", flush=True)
    return failed


def main() -> None:
    """Run the chosen benchmarks, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default=",".join(BENCHES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        one(asked.one, quick=asked.quick)
        return
    names = asked.only.split(",")
    if unknown := set(names) - set(BENCHES):
        raise SystemExit(f"no benchmark {', '.join(sorted(unknown))}: use {', '.join(BENCHES)}")
    began = time.monotonic()
    failed = several(names, quick=asked.quick)
    if not asked.quick:
        figures.main()
    print(f"all benchmarks: {time.monotonic() - began:.0f} s")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
