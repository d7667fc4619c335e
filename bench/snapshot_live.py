"""The part of the snapshot bench with running guests, in a lab: pauses, work, restores.

The figures are measured with `vmckpt snapshot` as an operator uses it, encrypted, with a local
store. Pauses are also measured without libvirt's backup-begin, which pauses the guest for its disks
and takes most of an ordinary pause. The observer measures the guest's work during a snapshot.
"""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.snapshot_peers import Failed
from vmckpt_lab import guests, host, ledger
from vmckpt_lab.observer import client
from vmckpt_lab.plan import LabPlan

ROOT = Path(__file__).parent.parent
HOST = "alpha"
BEFORE = 3.0
"""Seconds of undisturbed work, for comparison."""
SMALL_MIB, LARGE_MIB = 256, 4096
"""Memory of the guests whose snapshots by write tracking are compared."""
REWRITES = 5.0
"""Seconds after which such a guest has rewritten its region."""


@dataclass(frozen=True, slots=True)
class Hands:
    """Runs vmckpt in a lab, as an operator does."""

    plan: LabPlan
    keys: Path
    """Identity file with the private key that opens the snapshots."""

    def vmckpt(self, *words: str) -> Any:
        """Run a command. Returns its JSON output, or None without --json. Raises Failed."""
        program = [sys.executable, "-m", "vmckpt.cli.app", *words]
        more = {
            "VMCKPT_INVENTORY": str(self.plan.inventory),
            "VMCKPT_STATE": str(self.plan.folder / "state"),
        }
        done = subprocess.run(
            program, check=False, capture_output=True, text=True, env={**os.environ, **more}
        )
        if done.returncode != 0:
            raise Failed(f"vmckpt {' '.join(words)}: {done.stderr[-500:]}")
        return json.loads(done.stdout) if "--json" in words else None

    def inside(self, *words: str, program: str = "bench.snapshot_inside") -> Any:
        """Run a part of a bench on the host itself. Returns its JSON output. Raises Failed."""
        entered = host.enter(
            self.plan.host(HOST), "sh", "-c", 'cd "$0" && exec "$@"', str(ROOT),
            sys.executable, "-m", program, *words,
        )  # fmt: skip
        done = subprocess.run(entered, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise Failed(f"{' '.join(words)}: {done.stderr[-500:]}")
        return json.loads(done.stdout)

    def guest(self, name: str, **wishes: Any) -> None:
        """Start a guest, and wait for a moment."""
        guests.start(self.plan, name, HOST, **wishes)
        time.sleep(5.0)

    def gone(self, name: str) -> bool:
        """Remove a guest. Returns whether its ledgers were intact."""
        whole = ledger.audit(self.plan, name).whole
        guests.remove(self.plan, name)
        return whole


def begin(plan: LabPlan) -> Hands:
    """Create a store and a key, so that snapshots are encrypted."""
    hands = Hands(plan, plan.folder / "identity")
    made = hands.vmckpt("snapshot", "keys", "new", str(hands.keys), "--no-passphrase", "--json")
    hands.vmckpt("snapshot", "keys", "add", "bench", str(made["key"]))
    hands.vmckpt("snapshot", "init")
    return hands


def shared(hands: Hands, turns: int, out: Path) -> dict[str, Any]:
    """Measure incremental snapshots of a guest with shared memory; write the peers' input."""
    hands.guest("shared", memory="256MiB", dirty="64MiB@20MiB/s", disk="64MiB", shared_memory=True)
    disk = hands.plan.shared / "shared.raw"
    hands.inside("images", "shared", "/dev/shm/images", str(disk), str(out), "5")
    engine = hands.inside("pauses", "shared", "/dev/shm/pauses", str(turns))
    try:
        commands = [_create(hands, "shared", "--way", "shared") for _ in range(turns + 1)]
        with_disks = {"first": commands[0], "turns": commands[1:]}
    except Failed as exc:
        with_disks = {"failed": str(exc)}
    return {"engine": engine, "with_disks": with_disks, "ledgers_whole": hands.gone("shared")}


def _create(hands: Hands, guest: str, *more: str) -> dict[str, Any]:
    told = hands.vmckpt("snapshot", "create", guest, *more, "--json")
    time.sleep(1.0)
    return _figures(told)


def _figures(told: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a report, and the parts of the pause."""
    return {
        name: one
        for name, one in told.items()
        if name == "phases_ms" or isinstance(one, (int, float))
    }


def idle(hands: Hands, turns: int) -> dict[str, Any]:
    """Measure later snapshots of an idle guest, and their restores."""
    hands.guest("idle", memory="256MiB", dirty="64MiB@0MiB/s", disk="64MiB")
    store = hands.plan.shared / "snapshots"
    sizes = [_bytes(store)]
    last = {}
    for _ in range(turns + 1):
        last = hands.vmckpt("snapshot", "create", "idle", "--json")
        sizes.append(_bytes(store))
        time.sleep(1.0)
    grown = np.diff(sizes).tolist()
    back = []
    for _ in range(turns + 1):
        began = time.monotonic()
        words = ["snapshot", "restore", str(last["id"]), "--replace", "--json"]
        told = hands.vmckpt(*words, "--identity", str(hands.keys))
        back.append({**_figures(told), "command": time.monotonic() - began})
        time.sleep(1.0)
    guests.remove(hands.plan, "idle")  # no audit: the restores set the guest back in time
    return {"first_bytes": grown[0], "later_bytes": grown[1:], "restores": back[1:]}


def tracked(hands: Hands, turns: int) -> dict[str, Any]:
    """Measure later snapshots of a small and a large guest that write the same amount of memory."""
    found: dict[str, Any] = {}
    for mib in (SMALL_MIB, LARGE_MIB):
        name = f"tracked{mib}"
        hands.guest(name, memory=f"{mib}MiB", dirty="64MiB@20MiB/s", disk="64MiB")
        told = []
        for _ in range(turns + 1):
            began = time.monotonic()
            one = hands.vmckpt("snapshot", "create", name, "--json")
            told.append({**_figures(one), "command": time.monotonic() - began, "way": one["way"]})
            time.sleep(REWRITES)
        found[str(mib)] = {
            "first": told[0], "turns": told[1:], "ledgers_whole": hands.gone(name),
        }  # fmt: skip
    return found


def _bytes(store: Path) -> int:
    return sum(one.stat().st_size for one in store.rglob("*") if one.is_file())


def busy(hands: Hands, turns: int) -> dict[str, Any]:
    """Measure background snapshots of a guest that writes a lot."""
    hands.guest("busy", memory="512MiB", dirty="256MiB@80MiB/s", disk="64MiB")
    found = []
    for _ in range(turns):
        with Work(hands.plan, "busy") as work:
            time.sleep(BEFORE + 0.2)
            told = hands.inside("background", "busy", "/var/tmp/bench-background")
            time.sleep(0.5)
        began, ended = told["window"]
        undisturbed = work.rate(began - BEFORE, began)
        told["share"] = work.rate(began, ended) / undisturbed
        told["pages_a_second"] = undisturbed
        found.append(told)
    return {"turns": found, "ledgers_whole": hands.gone("busy")}


class Work:
    """Records how much memory a guest writes, by the host's clock. Use as a context manager."""

    def __init__(self, plan: LabPlan, guest: str) -> None:
        self._plan, self._guest = plan, guest
        self._over = threading.Event()
        self._seen: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Work":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.03):
            seen = client.status(self._plan.observer_socket, self._guest)
            self._seen.append((seen.now, seen.pages_written))

    def rate(self, began: float, ended: float) -> float:
        """Return the pages written per second between two times, in monotonic seconds."""
        times, pages = zip(*self._seen, strict=True)
        written = np.interp([began, ended], times, pages)
        return float(written[1] - written[0]) / (ended - began)
