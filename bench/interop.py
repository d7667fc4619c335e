"""Check that two versions of vmckpt can continue each other's work.

    git worktree add /tmp/before REVISION
    sudo .venv/bin/python -m bench.interop /tmp/before [--only WORD] [--json FILE]

An agent always has the version of the controller that starts it. But protections and snapshots
outlive an update, and so do the journal and undo files of a killed controller; after the update,
they were written by the other version. Each scene runs in the lab in both directions: begun by one
version, and examined and ended by the other. Prints a line for each. The exit status is 1 if the
state of a guest, its data or a host was wrong.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.bench import Bench, first_line, gathered, until
from tests.lab.protecting import (
    GUEST,
    SOON,
    epochs,
    lab_with_witness,
    left,
    on_qemu,
    standby,
    tidied,
)
from tests.lab.snapshots import SMALL, proofs
from vmckpt.units import parse_rate
from vmckpt_lab import host, lab, network

_HERE = Path(__file__).parents[1]
_MOVED = {"memory": "512MiB"}


@dataclass(frozen=True, slots=True)
class Version:
    """A source tree of vmckpt, and the module of its command."""

    name: str
    tree: Path
    module: str

    @classmethod
    def of(cls, name: str, tree: Path) -> "Version":
        """Return the version in a source tree. Raises OSError or KeyError without vmckpt."""
        told = tomllib.loads((tree / "pyproject.toml").read_text())
        return cls(name, tree, str(told["project"]["scripts"]["vmckpt"]).partition(":")[0])

    def start(self, bench: Bench, *words: str) -> subprocess.Popen[str]:
        """Start a command of this version."""
        return subprocess.Popen(
            [sys.executable, "-m", self.module, *words], cwd=self.tree, text=True,
            env={**bench.environment, "PYTHONPATH": str(self.tree)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def good(self, bench: Bench, *words: str) -> Any:
        """Run a command and return its output. Raises AssertionError if the command fails."""
        process = self.start(bench, *words)
        out, err = gathered(process, limit=300.0)
        assert process.returncode == 0, f"vmckpt {' '.join(words)} of {self.name}: {err}"
        return json.loads(out) if "--json" in words else out


def _protect(bench: Bench, version: Version, failover: str) -> None:
    version.good(bench, "protect", "web1", *standby(failover), "--json")
    epochs(bench)


def unprotected(bench: Bench, one: Version, other: Version) -> None:
    """The other version shows a protection, and ends it."""
    bench.guest(**GUEST)
    _protect(bench, one, "automatic")

    def ready() -> bool:
        """Return whether the standby is ready. Called repeatedly: a busy host may be slow."""
        (seen,) = other.good(bench, "status", "web1", "--json")
        return bool((seen["says"].get("beta") or {}).get("ready"))

    until(ready, limit=SOON)
    listed = {row["host"]: row["state"] for row in other.good(bench, "guests", "--json")}
    assert listed == {"alpha": "running", "beta": "standby"}, listed
    other.good(bench, "unprotect", "web1", "--json")
    assert left(bench) + on_qemu(bench, "alpha") == []
    assert bench.where() == ["alpha"]


def failed_over(bench: Bench, one: Version, other: Version) -> None:
    """The host of a protected guest dies; the other version recovers the protection."""
    bench.guest(**GUEST)
    _protect(bench, one, "automatic")
    died = time.monotonic()
    host.power_off(bench.plan.host("alpha"))
    until(lambda: (bench.seen().answered_at or 0) > died + 0.2, limit=SOON)
    lab.heal(bench.plan, "alpha")
    done = other.good(bench, "recover", "--json")
    assert [row["outcome"] for row in done] == ["completed"], done
    assert left(bench) == []
    assert bench.where() == ["beta"]


def switched(bench: Bench, one: Version, other: Version) -> None:
    """The other version moves a protected guest to its standby."""
    bench.guest(**GUEST)
    _protect(bench, one, "manual")
    done = other.good(bench, "failover", "web1", "--planned", "--json")
    assert done["runs_on"] == "beta", done
    assert left(bench) == []


def restored(bench: Bench, one: Version, other: Version) -> None:
    """The other version verifies and restores a snapshot, and takes the next in its chain."""
    bench.guest(**SMALL)
    made = one.good(bench, "snapshot", "create", "web1", "--json")
    found = other.good(bench, "snapshot", "verify", made["id"], "--json")
    assert not found.get("wrong"), found
    next_ = other.good(bench, "snapshot", "create", "web1", "--json")
    assert next_["same_bytes"] > 0.5 * next_["read_bytes"], next_
    other.good(bench, "snapshot", "restore", made["id"], "--replace", "--json")
    assert bench.where() == ["alpha"]


def resumed(bench: Bench, one: Version, other: Version) -> None:
    """A controller is killed during a migration; the other version determines the outcome."""
    bench.guest(**_MOVED)
    network.shape(bench.plan, "alpha", parse_rate("400mbit"))
    moving = one.start(bench, "migrate", "web1", "--to", "beta")
    first_line(moving, "iteration=1")
    moving.kill()
    gathered(moving)
    until(lambda: bench.where() == ["beta"], limit=120.0)
    done = other.good(bench, "recover", "--json")
    assert [row["outcome"] for row in done] == ["completed"], done


def undone(bench: Bench, one: Version, other: Version) -> None:
    """A controller is killed while a snapshot is taken; the other version undoes it."""
    bench.guest(**SMALL | {"memory": "512MiB", "dirty": "300MiB@20MiB/s"})
    taking = one.start(bench, "snapshot", "create", "web1")
    first_line(taking, "capture")
    taking.kill()
    gathered(taking)
    done = other.good(bench, "recover", "--json")
    assert [row["outcome"] for row in done] == ["failed"], done
    bench.good("migrate", "web1", "--to", "beta")


SCENES: Mapping[str, Callable[[Bench, Version, Version], None]] = {
    "protect, then unprotect": unprotected,
    "protect, then the host dies": failed_over,
    "protect, then a planned switch": switched,
    "snapshot, then verify and restore": restored,
    "migrate, killed, then recover": resumed,
    "snapshot, killed, then recover": undone,
}


def played(bench: Bench, name: str, one: Version, other: Version) -> dict[str, Any]:
    """Run a scene in one direction. Returns the result."""
    with tidied(bench):
        try:
            SCENES[name](bench, one, other)
            # After a restore, the observer has received more than the guest remembers.
            lost = proofs(bench) if "restore" in name else _not_whole(bench)
            wrong = f"data lost: {', '.join(lost)}" if lost else None
        except (AssertionError, KeyError, subprocess.SubprocessError) as exc:
            wrong = f"{type(exc).__name__}: {exc}"
    return {"scene": name, "begun_by": one.name, "ended_by": other.name, "wrong": wrong}


def _not_whole(bench: Bench) -> list[str]:
    return [what for what, whole in bench.ledgers().items() if not whole]


def main() -> None:
    """Run the scenes in both directions, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, help="source tree of the other version")
    parser.add_argument("--only", default="", help="only scenes whose names contain this word")
    parser.add_argument("--json", type=Path)
    told = parser.parse_args()
    here, there = Version.of("this", _HERE), Version.of("the other", told.tree.absolute())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # the lab is removed
    found = []
    with lab_with_witness(f"i{os.getpid()}") as bench:
        bench.good("snapshot", "init")
        for name in SCENES:
            for one, other in ((here, there), (there, here)):
                if told.only in name:
                    found.append(played(bench, name, one, other))
                    row = found[-1]
                    said = "passed" if row["wrong"] is None else row["wrong"]
                    print(f"{name}: begun by {one.name}, ended by {other.name}: {said}", flush=True)
    if told.json is not None:
        told.json.write_text(json.dumps(found, indent=1))
    sys.exit(1 if any(row["wrong"] for row in found) else 0)


if __name__ == "__main__":
    main()
