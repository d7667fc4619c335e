"""The snapshot bench's figures of guests that run, in a lab: pauses, work done meanwhile, restores.

Each is measured by `vmckpt snapshot` as an operator runs it, encrypted, into a local store; pauses
also by the engine alone, for libvirt's backup-begin, which holds the guest for its disks, is most
of an ordinary pause. What a guest does while it is captured is told by the observer outside.
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
"""Seconds of undisturbed work that are compared with."""


@dataclass(frozen=True, slots=True)
class Hands:
    """A lab, and vmckpt as a person would use it there."""

    plan: LabPlan
    keys: Path
    """An identity: who can open the snapshots."""

    def vmckpt(self, *words: str) -> Any:
        """A command's JSON, or nothing; Failed if it fails."""
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
        """A part of a bench on the host itself; its JSON."""
        entered = host.enter(
            self.plan.host(HOST), "sh", "-c", 'cd "$0" && exec "$@"', str(ROOT),
            sys.executable, "-m", program, *words,
        )  # fmt: skip
        done = subprocess.run(entered, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise Failed(f"{' '.join(words)}: {done.stderr[-500:]}")
        return json.loads(done.stdout)

    def guest(self, name: str, **wishes: Any) -> None:
        """Start a guest, and let it settle."""
        guests.start(self.plan, name, HOST, **wishes)
        time.sleep(5.0)

    def gone(self, name: str) -> bool:
        """End a guest; whether its ledgers were whole."""
        whole = ledger.audit(self.plan, name).whole
        guests.remove(self.plan, name)
        return whole


def begin(plan: LabPlan) -> Hands:
    """A store, and a key: from here on snapshots are encrypted."""
    hands = Hands(plan, plan.folder / "identity")
    made = hands.vmckpt("snapshot", "keys", "new", str(hands.keys), "--no-passphrase", "--json")
    hands.vmckpt("snapshot", "keys", "add", "bench", str(made["key"]))
    hands.vmckpt("snapshot", "init")
    return hands


def shared(hands: Hands, turns: int, out: Path) -> dict[str, Any]:
    """Incremental snapshots of a guest whose memory is a file; and the images for the peers."""
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
    """Numbers, and the parts of a pause."""
    return {
        name: one
        for name, one in told.items()
        if name == "phases_ms" or isinstance(one, (int, float))
    }


def idle(hands: Hands, turns: int) -> dict[str, Any]:
    """Second snapshots of a guest that does nothing, and the way back from them."""
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
    guests.remove(hands.plan, "idle")  # time went back: its ledgers cannot agree with the outside
    return {"first_bytes": grown[0], "later_bytes": grown[1:], "restores": back[1:]}


def _bytes(store: Path) -> int:
    return sum(one.stat().st_size for one in store.rglob("*") if one.is_file())


def busy(hands: Hands, turns: int) -> dict[str, Any]:
    """Background snapshots of a guest that writes a lot."""
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
    """How much a guest wrote, by the host's clock. Use as a context manager."""

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
        """Pages a second between two moments."""
        times, pages = zip(*self._seen, strict=True)
        written = np.interp([began, ended], times, pages)
        return float(written[1] - written[0]) / (ended - began)
