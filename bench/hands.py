"""Use a lab in a benchmark as an operator does: commands, guests, and a guest's work."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import Failed
from vmckpt_lab import guests, host, ledger
from vmckpt_lab.observer import client
from vmckpt_lab.plan import LabPlan

ROOT = Path(__file__).parent.parent
HOST = "alpha"


@dataclass(frozen=True, slots=True)
class Hands:
    """Runs vmckpt in a lab, as an operator does."""

    plan: LabPlan
    keys: Path
    """Identity file with the private key that opens the snapshots."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables that make vmckpt use this lab."""
        return {
            "VMCKPT_INVENTORY": str(self.plan.inventory),
            "VMCKPT_STATE": str(self.plan.folder / "state"),
        }

    def command(self, *words: str) -> list[str]:
        """Return the command line of vmckpt."""
        return [sys.executable, "-m", "vmckpt.cli.app", *words]

    def vmckpt(self, *words: str) -> Any:
        """Run a command. Returns its JSON output, or None without --json. Raises Failed."""
        done = subprocess.run(
            self.command(*words), check=False, capture_output=True, text=True,
            env={**os.environ, **self.environment},
        )  # fmt: skip
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


def versions() -> dict[str, str]:
    """Return the versions of QEMU and libvirt, with whose tools vmckpt is compared."""
    found = {}
    for name, words in (("QEMU", "qemu-system-x86_64 --version"), ("libvirt", "virsh --version")):
        shown = subprocess.run(words.split(), check=True, capture_output=True, text=True).stdout
        known = re.search(r"[0-9]+(\.[0-9]+)+", shown)
        found[name] = known[0] if known else "unknown"
    return found
