"""Measure how long commands take, from their start to their exit, and which parts they consist of.

    sudo .venv/bin/python -m bench.commands [--turns 5] [--only snapshots,protect,migrate]
        [--json bench/results/commands.json]

In a lab with two hosts and links without a limit, a guest of 256 MiB is running. In each turn:

* snapshots: take a snapshot with memory, and restore it in place of the running guest
* protect: protect the guest until its standby is ready, show the status, and end the protection
* migrate: move the guest with vmckpt, with and without the measurement of the forecast, and with
  `virsh migrate --live` and the same flags

A turn that is not measured precedes the others, so that an agent waits on each host. Another turn
follows, in which the commands record their phases (bench.command_phases). The figures are medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench import snapshot_live
from bench.migrate_vs_virsh import migrate_with_virsh
from bench.snapshot_peers import Failed
from vmckpt_lab import guests, lab
from vmckpt_lab.plan import LabPlan

GUEST = "web1"
PARTS = ("snapshots", "protect", "migrate")
_REST = 1.5
"""Seconds between two commands, in which the guest and the hosts settle."""


class Clock:
    """Runs commands, and notes how long each takes."""

    def __init__(self, plan: LabPlan) -> None:
        self.plan = plan
        self.took: defaultdict[str, list[float]] = defaultdict(list)
        """Milliseconds, by command."""
        self.moved: defaultdict[str, list[float]] = defaultdict(list)
        """Milliseconds of the migration itself, as reported by vmckpt, by command."""
        self.phases: dict[str, list[tuple[str, float, float]]] = {}
        self.notes_phases = False

    def vmckpt(self, name: str, *words: str) -> Any:
        """Run a command, and note its time or its phases under `name`. Returns its JSON output."""
        file = self.plan.folder / "phases.json"
        program = [str(Path(sys.executable).parent / "vmckpt")]
        if self.notes_phases:
            program = [sys.executable, "-m", "bench.command_phases", str(file)]
        told = self._run(name, [*program, *words, "--json"])
        if self.notes_phases:
            self.phases[name] = json.loads(file.read_text())
        return json.loads(told)

    def virsh(self, to: str) -> None:
        """Move the guest with virsh."""
        self._run("virsh migrate", migrate_with_virsh(self.plan, to))

    def _run(self, name: str, program: list[str]) -> str:
        more = {
            "VMCKPT_INVENTORY": str(self.plan.inventory),
            "VMCKPT_STATE": str(self.plan.folder / "state"),
        }
        began = time.monotonic()
        done = subprocess.run(
            program, check=False, capture_output=True, text=True, env={**os.environ, **more}
        )
        took = (time.monotonic() - began) * 1000
        if done.returncode != 0:
            raise Failed(f"{' '.join(program)}: {done.stderr[-500:]}")
        if not self.notes_phases:
            self.took[name].append(took)
        time.sleep(_REST)
        return done.stdout


def snapshots(clock: Clock) -> None:
    """Take a snapshot, and restore it."""
    taken = clock.vmckpt("snapshot create", "snapshot", "create", GUEST)
    key = str(clock.plan.folder / "identity")
    clock.vmckpt(
        "snapshot restore", "snapshot", "restore", taken["id"], "--replace", "--identity", key
    )


def protect(clock: Clock) -> None:
    """Protect the guest, show the status, and end the protection."""
    clock.vmckpt("protect", "protect", GUEST, "--to", "beta")
    clock.vmckpt("status", "status", GUEST)
    clock.vmckpt("unprotect", "unprotect", GUEST)


def migrate(clock: Clock) -> None:
    """Move the guest four times; afterwards, it is on the first host again."""
    for to, name, more in (
        ("beta", "migrate", ()),
        ("alpha", "migrate --probe off", ("--probe", "off")),
    ):
        told = clock.vmckpt(name, "migrate", GUEST, "--to", to, "--tls", "off", *more)
        if not clock.notes_phases:
            clock.moved[name].append(told["total_ms"])
    for to in ("beta", "alpha"):
        clock.virsh(to)


def run(plan: LabPlan, turns: int, only: list[str]) -> dict[str, Any]:
    """Run all turns. Returns the figures."""
    snapshot_live.begin(plan)
    guests.start(plan, GUEST, "alpha", memory="256MiB", dirty="64MiB@20MiB/s")
    clock = Clock(plan)
    parts = {"snapshots": snapshots, "protect": protect, "migrate": migrate}
    for turn in range(turns + 2):
        clock.notes_phases = turn == turns + 1
        for name in only:
            parts[name](clock)
        if turn == 0:
            clock.took.clear()
            clock.moved.clear()
    return {
        "turns": turns,
        "medians_ms": {name: statistics.median(one) for name, one in clock.took.items()},
        "took_ms": clock.took,
        "migration_ms": {name: statistics.median(one) for name, one in clock.moved.items()},
        "phases": clock.phases,
    }


def show(found: dict[str, Any]) -> None:
    """Print the medians and the phases."""
    for name, median in found["medians_ms"].items():
        itself = found["migration_ms"].get(name)
        print(f"{name:<24}{median:>8.0f} ms", "" if itself is None else f"of these {itself:.0f} ms")
    for name, phases in found["phases"].items():
        print(f"\n{name}")
        for what, began, took in phases:
            print(f"  {began * 1000:>7.0f} {took * 1000:>7.0f}  {what}")


def main() -> None:
    """Build a lab, measure, print the figures and remove the lab."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--turns", type=int, default=5)
    words.add_argument("--only", default=",".join(PARTS))
    words.add_argument("--json", type=Path)
    asked = words.parse_args()
    name = f"bc{os.getpid()}"
    plan = lab.up(name)
    try:
        found = run(plan, asked.turns, asked.only.split(","))
    finally:
        lab.down(name)
    show(found)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
