"""Explore a protection's states, or check that each fix is needed.

    .venv/bin/python -m bench.model --states 100000 [--seed 1] [--json FILE]
    .venv/bin/python -m bench.model --reverted [NAME ...] [--states 300000]

The first form begins at each start (a new protection, its first epoch, a protected guest). It
visits all states, nearest first, and then follows random paths drawn from the seed. If an invariant
is violated, it fails and prints the steps that led to the violation. The second form reverts one
fix at a time, and fails unless a violation is found for each.

These faults may occur between any two effects, as often as the budget permits
(bench/model/world.py): killed agents and watchdogs, a crash of a host or of the lease store, a
failover of the lease store that loses a change, a broken link, requests that receive no answer or
arrive late, slow clocks, `virsh resume`, an unplugged card, and orders of a controller.
"""

import argparse
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.model import alpha, beta, explore, reverted, starts
from bench.model.explore import Found
from bench.model.moves import Moves
from bench.model.world import Budget


def main() -> int:
    """Run the exploration. Returns 1 for a violation or, with --reverted, a missing violation."""
    parser = argparse.ArgumentParser(prog="python -m bench.model")
    parser.add_argument("--states", type=int, default=100_000, metavar="N", help="states in all")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random paths")
    parser.add_argument(
        "--reverted",
        nargs="*",
        metavar="NAME",
        help="revert these fixes; default: all",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the results")
    told = parser.parse_args()
    with ExitStack() as stack:
        stack.enter_context(alpha.on_fakes())
        stack.enter_context(beta.on_fakes())
        if told.reverted is None:
            rows = _explored(told.states, told.seed)
            good = not any(row["violation"] for row in rows)
        else:
            rows = _reverted(told.reverted, told.states)
            good = all(row["violation"] for row in rows)
    if told.json is not None:
        told.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if good else 1


def _explored(states: int, seed: int) -> list[dict[str, Any]]:
    """Explore most states nearest first, and an eighth along random paths, which lead far."""
    rows, all_of_one = [], states // len(starts.NAMES)
    for name in starts.NAMES:
        far = all_of_one // 8
        for way, each in (("by turns", all_of_one - far), (f"random paths, seed {seed}", far)):
            first, moves, began = starts.start(name, Budget()), Moves(), time.monotonic()
            if way == "by turns":
                found = explore.search(first, moves, states=each)
            else:
                found = explore.random_paths(first, moves, states=each, seed=seed)
            rows.append(_row(f"{name}, {way}", found, began))
    print(f"{sum(row['states'] for row in rows):,} states in all")
    return rows


def _reverted(names: list[str], states: int) -> list[dict[str, Any]]:
    rows = []
    for one in reverted.ALL:
        if names and not any(name in one.name for name in names):
            continue
        first, began = one.begins(), time.monotonic()
        with one.applied():
            found = explore.search(first, Moves(), states=states)
        rows.append(_row(one.name, found, began))
    return rows


def _row(name: str, found: Found, began: float) -> dict[str, Any]:
    took = time.monotonic() - began
    end = found.violation or ("all of them" if found.complete else "no violation")
    print(
        f"{name}: {found.states:,} states, {found.steps:,} steps, {took:.1f} s: {end}", flush=True
    )
    for label in found.trace if found.violation else ():
        print(f"    {label}")
    return {
        "name": name, "states": found.states, "steps": found.steps, "seconds": round(took, 1),
        "violation": found.violation, "complete": found.complete, "trace": list(found.trace),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
