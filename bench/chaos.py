"""Run campaigns of vmckpt lab chaos: count the injected faults, and what was lost.

Each lab has its own process and its own seed. After an operation that violated an invariant, a new
lab continues with the next operation, so the totals include the operations of all labs.

    sudo .venv/bin/python bench/chaos.py [--operations 500] [--seed 1] [--labs 2] [--postgres]
        [--json bench/results/chaos.json]
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_COUNTERS = ("faults", "moments_hit", "moments_missed", "outcomes")
_SUMS = (
    "operations", "seconds", "rightly_gone", "histories", "history_operations",
    "histories_unknown", "histories_broken", "ledgers_lost", "two_copies_seen",
    "unknown_states_left", "other_troubles",
)  # fmt: skip
# The campaign of a seed ends after more than this many labs.
_MOST_FAILURES = 20
_LONGEST_OPERATION = 400.0
STOPPED = threading.Event()


def shaken(seed: int, operations: int, *, postgres: bool) -> list[dict[str, Any]]:
    """Run all operations of a seed. Returns the tally of each lab."""
    tallies: list[dict[str, Any]] = []
    first = 1
    while first <= operations and len(tallies) <= _MOST_FAILURES and not STOPPED.is_set():
        tally = run(seed, first, operations - first + 1, postgres=postgres)
        tallies.append(tally)
        if "operations" not in tally:
            break
        # An operation that failed before it was counted is skipped, too.
        first += max(1, tally["operations"])
    return tallies


def run(seed: int, first: int, operations: int, *, postgres: bool) -> dict[str, Any]:
    """Run operations in a new lab until the first violation. Returns the lab's tally."""
    command = [sys.executable, "-m", "vmckpt.cli.app", "lab", "chaos", "--json"]
    command += ["--seed", str(seed), "--first", str(first), "--operations", str(operations)]
    command += ["--postgres"] if postgres else []
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        check=False,
        text=True,
        timeout=_LONGEST_OPERATION * operations,
        env=os.environ,
    )
    try:
        tally: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return {"seed": seed, "failed": f"no tally, exit code {done.returncode}"}
    return tally


def merged(tallies: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of all tallies."""
    total: dict[str, Any] = {key: sum(one.get(key, 0) for one in tallies) for key in _SUMS}
    for key in _COUNTERS:
        counted: Counter[str] = Counter()
        for one in tallies:
            counted.update(one.get(key, {}))
        total[key] = dict(sorted(counted.items()))
    total["seeds"] = sorted({one["seed"] for one in tallies})
    total["failed"] = [one["failed"] for one in tallies if one.get("failed")]
    return total


def show(total: dict[str, Any]) -> None:
    """Print the totals."""
    for fault, times in total["faults"].items():
        hit = f"{times:5d}  {fault}"
        print(hit)
    hit, missed = (sum(total[key].values()) for key in ("moments_hit", "moments_missed"))
    print(f"moments hit {hit}, missed {missed}: {total['moments_hit']}")
    each = total["seconds"] / max(1, total["operations"])
    print(f"{total['operations']} operations, {each:.1f} s each, {total['wall_s']:.0f} s in all")
    print(f"guests that died with their host or QEMU, as expected: {total['rightly_gone']}")
    for key in _SUMS[3:]:
        print(f"{key.replace('_', ' ')}: {total[key]}")
    for one in total["failed"]:
        print(f"failed: {one}")


def main() -> None:
    """Run the campaigns, print the totals and save them."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--operations", type=int, default=500)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--labs", type=int, default=2, help="number of concurrent labs")
    words.add_argument("--postgres", action="store_true", help="keep the journal in PostgreSQL")
    words.add_argument("--json", type=Path, default=Path("bench/results/chaos.json"))
    given = words.parse_args()
    began = time.monotonic()
    shares = [given.operations // given.labs] * given.labs
    shares[0] += given.operations - sum(shares)
    with ThreadPoolExecutor(given.labs) as pool:
        lots = [
            pool.submit(shaken, given.seed + number, share, postgres=given.postgres)
            for number, share in enumerate(shares)
            if share
        ]
        try:
            tallies = [tally for lot in lots for tally in lot.result()]
        except KeyboardInterrupt:
            STOPPED.set()  # Ctrl-C has also reached the labs; start no new labs
            tallies = [tally for lot in lots for tally in lot.result()]
    total = {**merged(tallies), "wall_s": round(time.monotonic() - began, 1)}
    show(total)
    given.json.write_text(json.dumps(total, indent=2) + "\n")
    sys.exit(1 if total["failed"] else 0)


if __name__ == "__main__":
    main()
