"""Measure how long a guest is paused if its agent dies or hangs during an epoch on busy CPUs.

    sudo .venv/bin/python -m bench.replication_starved 10 [--load 16] [--ttl 30] [--json FILE]

A guest is protected in a new lab, next to `--load` processes of normal priority that each use a
CPU. In each round, the agent is stopped in the middle of a pause. In every second round it is then
killed; in the others it stays stopped, so that the watchdog must detect that the agent hangs.
Prints how long the guest was paused, how long its vCPUs were idle, how long the lease was not
renewed, and how many agents the watchdog killed.
"""

import argparse
import json
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lab.bench import WHOLE, Bench, until
from tests.lab.protecting import GUEST, asked, epochs, lab_with_witness, protect
from tests.lab.starving import LOAD, Victim, busy

_LIMIT = 120.0


def rounds(bench: Bench, count: int, load: int) -> list[dict[str, Any]]:
    """Stop or kill the agent `count` times. Returns the measurements of each round."""
    victim, found = Victim(bench), []
    with busy(load):
        for turn in range(count):
            number = signal.SIGSTOP if turn % 2 else signal.SIGKILL
            before = len(victim.log())
            struck = victim.strike(number, _LIMIT)
            until(lambda: asked(bench).get("phase") == "protecting", limit=_LIMIT)
            told = {
                "signal": number.name, "paused_s": struck.paused, "still_s": struck.still,
                "renewed_s": struck.renewed, "log": victim.log()[before:],
            }  # fmt: skip
            print(json.dumps(told), file=sys.stderr)

            found.append(told)
    victim.close()
    return found


def shown(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the results as lines of text."""
    lines = []
    for name in ("SIGKILL", "SIGSTOP"):
        mine = [one for one in found if one["signal"] == name]
        for key in ("paused_s", "still_s", "renewed_s"):
            told = sorted(one[key] for one in mine if one[key] is not None)
            if told:
                lines.append(
                    f"{name} {key}: median {statistics.median(told):.3f}, worst {told[-1]:.3f},"
                    f" of {len(told)}"
                )
    killed = sum("killed the agent" in line for one in found for line in one["log"])
    stopped = sum(one["signal"] == "SIGSTOP" for one in found)
    lines.append(f"agents that the watchdog killed: {killed}, of which {stopped} had been stopped")
    return lines


def main() -> None:
    """Run the rounds and print the results. The exit status is 1 if data was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--load", type=int, default=LOAD)
    parser.add_argument("--ttl", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    told = parser.parse_args()
    with lab_with_witness(f"b{os.getpid()}") as bench:
        bench.guest(**GUEST)
        protect(bench, "--ttl", f"{told.ttl:g}s")
        epochs(bench)
        found = rounds(bench, told.rounds, told.load)
        bench.good("unprotect", "web1")
        whole = bench.ledgers() == WHOLE
    for line in shown(found):
        print(line)
    if told.json is not None:
        told.json.write_text(json.dumps(found, indent=1))
    sys.exit(0 if whole else 1)


if __name__ == "__main__":
    main()
