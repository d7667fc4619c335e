"""Measure how long commands take, from their start to their exit, and which parts they consist of.

    sudo bench/all --only commands

In a lab with two hosts and links without a limit, a guest of 256 MiB is running. In each turn:

* snapshots: take a snapshot with memory, and restore it in place of the running guest
* protect: protect the guest until its standby is ready, show the status, and end the protection
* migrate: move the guest with vmckpt, with and without the measurement of the forecast, and with
  `virsh migrate --live` and the same flags

A turn that is not measured precedes the others, so that an agent waits on each host. Another turn
follows, in which the commands record their phases (bench.command_phases). The figures are medians.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

from bench import hands, limits
from bench.figure import Figure, Result
from bench.hands import versions
from bench.migration import OTHER, virsh
from bench.peers import Failed
from vmckpt_lab import guests, lab
from vmckpt_lab.plan import LabPlan

GUEST = "web1"
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
        program = [sys.executable, "-m", "vmckpt.cli.app"]
        if self.notes_phases:
            program = [sys.executable, "-m", "bench.command_phases", str(file)]
        told = self._run(name, [*program, *words, "--json"])
        if self.notes_phases:
            self.phases[name] = json.loads(file.read_text())
        return json.loads(told)

    def virsh(self, to: str) -> None:
        """Move the guest with virsh."""
        self._run("virsh migrate", virsh(self.plan, GUEST, OTHER[to], to))

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


PARTS = (snapshots, protect, migrate)


def run(plan: LabPlan, turns: int) -> dict[str, Any]:
    """Run all turns. Returns the medians and the phases."""
    hands.begin(plan)
    guests.start(plan, GUEST, "alpha", memory="256MiB", dirty="64MiB@20MiB/s")
    clock = Clock(plan)
    for turn in range(turns + 2):
        clock.notes_phases = turn == turns + 1
        for part in PARTS:
            part(clock)
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


def figures(told: dict[str, Any], python: float) -> tuple[Figure, ...]:
    """Return the figures; `python`: the time in which Python starts, in seconds. Pure."""
    peer = told["medians_ms"].pop("virsh migrate")
    return tuple(
        Figure(what=f"`vmckpt {name}`", unit="s", ours=took / 1e3, limit=python,
               limit_is="start of Python", peer=peer / 1e3 if "migrate" in name else None,
               peer_is="virsh migrate" if "migrate" in name else "")
        for name, took in told["medians_ms"].items()
    )  # fmt: skip


def measure(*, quick: bool) -> Result:
    """Measure the commands in a lab; `quick`: one turn."""
    name = f"bc{os.getpid()}"
    plan = lab.up(name)
    try:
        told = run(plan, 1 if quick else 3)
    finally:
        lab.down(name)
    rows = figures({**told, "medians_ms": dict(told["medians_ms"])}, limits.start_of_python())
    return Result(figures=rows, versions=versions(), raw=told)
