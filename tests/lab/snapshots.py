"""What the lab tests of snapshots share: a guest, and what there is of it and of its snapshots."""

import json
import subprocess
import sys
from typing import Any

from tests.lab.bench import Bench, Done
from tests.support.paths import ROOT
from vmckpt_lab import host, ledger

FOLDER = "/dev/shm/captured"
SMALL = {"memory": "192MiB", "dirty": "16MiB@1MiB/s", "disk": "32MiB"}


def taken(bench: Bench, *more: str) -> Done:
    return bench.good("snapshot", "create", "web1", "--json", *more)


def ids(bench: Bench) -> list[str]:
    return [one["id"] for one in bench.good("snapshot", "list", "--json").json]


def proofs(bench: Bench, name: str = "web1") -> list[str]:
    """What of memory and disk is wrong, by the guest's own check; outside, time went back."""
    entries = ledger.audit(bench.plan, name).entries
    return [
        one.text for one in entries if one.name in ("memory", "disk") and "0 wrong" not in one.text
    ]


def left(bench: Bench) -> list[str]:
    """What agents have left on the hosts, but for lines and what they know of the store."""
    roots = [one.root / "agent" for one in bench.plan.hosts]
    files = [path for root in roots for path in root.rglob("*") if path.is_file()]
    beside = {"lines", "cache"}
    return [str(path) for path in files if not beside & set(path.parts)]


def order(what: str, *words: str, folder: str = FOLDER, on: str = "alpha", bench: Bench) -> Any:
    """Run `capturing` in a host; its answer, or None if it was killed."""
    program = [sys.executable, "-m", "tests.lab.capturing", what, "web1", folder, *words]
    inside = host.enter(
        bench.plan.host(on), "sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), *program
    )
    done = subprocess.run(inside, check=False, capture_output=True, text=True)
    if done.returncode in (137, -9):
        return None
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def gone(bench: Bench, *more: str) -> None:
    """Remove what a test has written on the host."""
    bench.inside("alpha", "rm", "-rf", FOLDER, f"{FOLDER}.undo", f"{FOLDER}.disk", *more)
