"""Measure the time and memory that the check of a history takes.

    .venv/bin/python -m bench.history [--operations 10000] [--json bench/results/history.json]

The lab's clients generate the histories in simulated time (tests/support/histories.py): histories
of 16 clients of an unprotected guest, and of a protected guest that fails over in the middle. A
protected guest answers all operations of an epoch at once. In the guest's store, every answer
contains the cell's previous value. "Blind" writes do not return the previous value, like writes to
an ordinary register; the check must then try far more orders. In half of the rows, the answer to
the last read is impossible, so the check must try all orders.
"""

import argparse
import json
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.histories import World, untold
from vmckpt_lab.history.history import History, Kind
from vmckpt_lab.history.key_value import KeyValue
from vmckpt_lab.history.linearizability import check

CLIENTS = 16
_LIMIT = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A kind of history."""

    keys: int
    protected: bool
    blind: bool
    wrong: bool

    def made(self, operations: int, seed: int) -> History:
        """Return a history in which at least `operations` operations have returned."""
        seconds = operations / (220.0 if self.protected else 350.0)
        while True:
            world = World(
                seed, clients=CLIENTS, keys=self.keys, epoch=0.2 if self.protected else None,
                dies=seconds / 2 if self.protected else None,
            )  # fmt: skip
            known = world.play(seconds)
            if known.answered >= operations:
                break
            seconds *= 1.1
        known = untold(known) if self.blind else known
        return _with_a_stale_read(known) if self.wrong else known


def _with_a_stale_read(known: History) -> History:
    """Change the answer to the last read of a register to a value overwritten long before."""
    reads = [
        one for one in known.operations
        if one.input.kind is Kind.READ and one.input.key == 0 and one.returned is not None
    ]  # fmt: skip
    late = replace(reads[-1], output=reads[0].output)
    return replace(
        known, operations=tuple(late if one is reads[-1] else one for one in known.operations)
    )


def rows() -> Iterator[Row]:
    """Yield all kinds. At least two keys, because the last key is a counter, not a register."""
    for keys in (5, 2):
        for protected in (False, True):
            for blind in (False, True):
                for wrong in (False, True):
                    yield Row(keys=keys, protected=protected, blind=blind, wrong=wrong)


def measured(row: Row, operations: int, seed: int) -> dict[str, Any]:
    """Measure a row."""
    known = row.made(operations, seed)
    began = time.process_time()
    verdict = check(known.operations, KeyValue(), lambda: time.process_time() > began + _LIMIT)
    took = time.process_time() - began
    tracemalloc.start()
    check(known.operations, KeyValue(), lambda: False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "keys": row.keys, "protected": row.protected, "blind": row.blind, "wrong": row.wrong,
        "answered": known.answered, "pending": known.pending, "verdict": type(verdict).__name__,
        "cpu_s": round(took, 3), "peak_mib": round(peak / 2**20, 1),
    }  # fmt: skip


def main() -> None:
    """Measure all rows, print them and save them."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--operations", type=int, default=10_000)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--json", type=Path, default=Path("bench/results/history.json"))
    given = words.parse_args()
    found = []
    for row in rows():
        one = measured(row, given.operations, given.seed)
        print(json.dumps(one), flush=True)
        found.append(one)
    given.json.write_text(json.dumps({"clients": CLIENTS, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
