"""Check that two versions of vmckpt can continue each other's work.

    git worktree add /tmp/before REVISION
    sudo .venv/bin/python -m bench.interop /tmp/before [--only WORD] [--json FILE]

An agent is always of the version of the controller that starts it. But protections last, snapshots
are kept, and a controller that was killed leaves its journal and undo files; after an update these
are the other version's. In a lab of its own each scene is played in both directions: begun by one
version, looked at and ended by the other. Printed is a line for each; exit status 1 if a guest, its
data or anything on a host was not as it must be.
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
    """A tree of vmckpt, and how its command is started."""

    name: str
    tree: Path
    module: str

    @classmethod
    def of(cls, name: str, tree: Path) -> "Version":
        """Raises OSError and KeyError if there is no vmckpt."""
        told = tomllib.loads((tree / "pyproject.toml").read_text())
        return cls(name, tree, str(told["project"]["scripts"]["vmckpt"]).partition(":")[0])

    def start(self, bench: Bench, *words: str) -> subprocess.Popen[str]:
        """Start one of its commands."""
        return subprocess.Popen(
            [sys.executable, "-m", self.module, *words], cwd=self.tree, text=True,
            env={**bench.environment, "PYTHONPATH": str(self.tree)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def good(self, bench: Bench, *words: str) -> Any:
        """What a command printed that must end well. Raises AssertionError."""
        process = self.start(bench, *words)
        out, err = gathered(process, limit=300.0)
        assert process.returncode == 0, f"vmckpt {' '.join(words)} of {self.name}: {err}"
        return json.loads(out) if "--json" in words else out


def _protect(bench: Bench, version: Version, failover: str) -> None:
    version.good(bench, "protect", "web1", *standby(failover), "--json")
    epochs(bench)


def unprotected(bench: Bench, one: Version, other: Version) -> None:
    """A protection is looked at by the other version, and ended."""
    bench.guest(**GUEST)
    _protect(bench, one, "automatic")

    def ready() -> bool:
        """A busy host may not answer in time."""
        (seen,) = other.good(bench, "status", "web1", "--json")
        return bool((seen["says"].get("beta") or {}).get("ready"))

    until(ready, limit=SOON)
    listed = {row["host"]: row["state"] for row in other.good(bench, "guests", "--json")}
    assert listed == {"alpha": "running", "beta": "standby"}, listed
    other.good(bench, "unprotect", "web1", "--json")
    assert left(bench) + on_qemu(bench, "alpha") == []
    assert bench.where() == ["alpha"]


def failed_over(bench: Bench, one: Version, other: Version) -> None:
    """The host of a protected guest dies; the other version puts everything in order."""
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
    """The other version verifies and restores a snapshot, and takes the next in its line."""
    bench.guest(**SMALL)
    made = one.good(bench, "snapshot", "create", "web1", "--json")
    found = other.good(bench, "snapshot", "verify", made["id"], "--json")
    assert not found.get("wrong"), found
    next_ = other.good(bench, "snapshot", "create", "web1", "--json")
    assert next_["same_bytes"] > 0.5 * next_["read_bytes"], next_
    other.good(bench, "snapshot", "restore", made["id"], "--replace", "--json")
    assert bench.where() == ["alpha"]


def resumed(bench: Bench, one: Version, other: Version) -> None:
    """A controller is killed in a migration; the other version finds out how it ended."""
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
    """One scene in one direction, and what was wrong."""
    with tidied(bench):
        try:
            SCENES[name](bench, one, other)
            # After a restore the outside has seen more than the guest remembers.
            lost = proofs(bench) if "restore" in name else _not_whole(bench)
            wrong = f"not whole: {', '.join(lost)}" if lost else None
        except (AssertionError, KeyError, subprocess.SubprocessError) as exc:
            wrong = f"{type(exc).__name__}: {exc}"
    return {"scene": name, "begun_by": one.name, "ended_by": other.name, "wrong": wrong}


def _not_whole(bench: Bench) -> list[str]:
    return [what for what, whole in bench.ledgers().items() if not whole]


def main() -> None:
    """Print a line for each scene and direction; exit status 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, help="of the other version")
    parser.add_argument("--only", default="", help="scenes with this word")
    parser.add_argument("--json", type=Path)
    told = parser.parse_args()
    here, there = Version.of("this", _HERE), Version.of("the other", told.tree.absolute())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # the lab is taken down
    found = []
    with lab_with_witness(f"i{os.getpid()}") as bench:
        bench.good("snapshot", "init")
        for name in SCENES:
            for one, other in ((here, there), (there, here)):
                if told.only in name:
                    found.append(played(bench, name, one, other))
                    row = found[-1]
                    said = "well" if row["wrong"] is None else row["wrong"]
                    print(f"{name}: begun by {one.name}, ended by {other.name}: {said}", flush=True)
    if told.json is not None:
        told.json.write_text(json.dumps(found, indent=1))
    sys.exit(1 if any(row["wrong"] for row in found) else 0)


if __name__ == "__main__":
    main()
