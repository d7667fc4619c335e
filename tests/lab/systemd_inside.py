"""Runs where systemd is process 1: a watchdog that is a unit, and is killed over and over.

    python -m tests.lab.systemd_inside FOLDER

What became of it is printed, as JSON.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.guards import Bench, dead, until
from vmckpt.lease.clock import boottime
from vmckpt.replication.watchdog import process, shared_page, systemd_unit

_TIMES = 6
"""More often than systemd starts a unit again that has no leave for more."""


def _again(bench: Bench, killed: int) -> int:
    """The watchdog that comes after one that was killed, once it looks."""
    until(lambda: bench.guards() not in ([], [killed]))
    looked = bench.page.guarded
    until(lambda: bench.page.guarded > looked)
    return bench.guard()


def story(folder: Path) -> dict[str, Any]:
    """From its beginning to its end."""
    name = systemd_unit.name_of(str(folder))
    bench, told = Bench(folder), dict[str, Any](available=systemd_unit.available())
    process.start(bench.facts, unit=True)
    watchdog = bench.guard()
    cgroup = Path(f"/proc/{watchdog}/cgroup").read_text().splitlines()[-1]
    told["cgroup"] = cgroup.rpartition(":")[2].endswith(f"/vmckpt.slice/{name}")
    for turn in range(_TIMES):
        os.kill(watchdog, signal.SIGKILL)
        if turn == 0:
            bench.agent.kill()
        watchdog = _again(bench, watchdog)
        if turn == 0:
            until(lambda: len(bench.agents()) == 1)
            bench.page.agent = shared_page.identity(bench.agents()[0])
    os.kill(watchdog, signal.SIGSTOP)
    watchdog = _again(bench, watchdog)
    os.kill(watchdog, signal.SIGKILL)
    process.start(bench.facts, unit=True)  # while systemd starts it again
    told["agents"] = len(bench.agents())
    told["agent_lives"] = Path(f"/proc/{bench.agents()[0]}").exists()
    bench.page.lasts = 0.4
    bench.page.renewed = boottime()
    ends = bench.page.renewed + 0.4
    told["late_s"] = until(lambda: dead(bench.qemu)) - ends
    (folder / process.OVER).touch()
    until(lambda: not bench.guards())
    until(lambda: _state(name) == "inactive")
    told["agent_outlives_it"] = Path(f"/proc/{bench.agents()[0]}").exists()
    bench.close()
    return told


def _state(name: str) -> str:
    words = ["systemctl", "is-active", name]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    made = Path(sys.argv[1])
    made.mkdir()
    sys.stdout.write(json.dumps(story(made)))
