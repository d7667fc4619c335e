"""Measure the cost of a step in the journal, and check that controllers exclude each other.

A step is an intent and its conclusion: two transactions, each on disk before the call returns. The
contenders are processes that acquire the lease on the same guest repeatedly. While a contender
holds the lease, it checks, without using the journal, that no other contender is acting, and that
its token is greater than all earlier tokens.

    sudo .venv/bin/python -m bench.journal [--steps 500] [--requests 1000] [--contenders 4]
        [--json bench/results/journal.json]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import postgres
from vmckpt.errors import GuestLocked
from vmckpt.journal import location as locations
from vmckpt.journal.records import NewOperation, StepState
from vmckpt.journal.store import Journal
from vmckpt.units import Seconds

TARGETS_MS = {"sqlite": 5.0, "postgresql": 10.0}
NEW = NewOperation(kind="migrate", guest="web1", guest_uuid="bench", source="alpha", target="beta")
GUEST = "guest/bench"
PATIENCE = Seconds(30.0)


@contextmanager
def journals(folder: Path) -> Iterator[dict[str, Path | str]]:
    """Yield a new journal of each kind."""
    server = postgres.Server()
    try:
        yield {"sqlite": folder / "journal.db", "postgresql": server.place()}
    finally:
        server.remove()


def cost(place: Path | str, steps: int) -> dict[str, float]:
    """Measure a step, its CPU time, and a heartbeat, in milliseconds."""
    with Journal(place) as journal:
        id_ = journal.begin(NEW)
        fence = journal.acquire(id_, GUEST)
        taken, computed, beats = [], [], []
        for number in range(steps + 20):
            began, computing = time.perf_counter(), time.process_time()
            seq = journal.intend(id_, "set-limits", {"number": number}, fence)
            journal.conclude(id_, seq, StepState.DONE, {"number": number}, fence)
            taken.append(1000 * (time.perf_counter() - began))
            computed.append(1000 * (time.process_time() - computing))
            began = time.perf_counter()
            journal.heartbeat(id_, fence=fence)
            beats.append(1000 * (time.perf_counter() - began))
        journal.finish(id_, "completed", None)
    taken = sorted(taken[20:])  # without the first steps, which fill caches
    return {
        "median_ms": round(statistics.median(taken), 2),
        "p95_ms": round(taken[int(0.95 * len(taken))], 2),
        "cpu_ms": round(statistics.median(computed), 2),
        "heartbeat_ms": round(statistics.median(beats), 2),
    }


def contend(place: Path | str, folder: Path, requests: int) -> dict[str, int]:
    """Run a contender: acquire the lease, act and release it, `requests` times.

    Returns how often the contender acted, was refused, and detected a violation.
    """
    acted = refused = doubled = 0
    with Journal(place, busy=PATIENCE) as journal:
        id_ = journal.begin(NEW)
        while acted < requests:
            try:
                fence = journal.acquire(id_, GUEST)
            except GuestLocked:
                refused += 1
                time.sleep(0.003)
                continue
            step = journal.intend(id_, "act", {}, fence)
            doubled += act(folder, fence.token)
            journal.conclude(id_, step, StepState.DONE, {}, fence)
            journal.release(fence)
            acted += 1
        journal.finish(id_, "completed", None)
    return {"acted": acted, "refused": refused, "doubled": doubled}


def act(folder: Path, token: int) -> int:
    """Act, and check that no other process acts. Returns 1 if a violation was detected.

    A violation is another process that acts at the same time, or an earlier token that was not
    smaller.
    """
    try:
        os.close(os.open(folder / "acting", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return 1
    seen = folder / "token"
    late = seen.exists() and int(seen.read_text()) >= token
    time.sleep(0.0005)
    seen.write_text(str(token))
    (folder / "acting").unlink()
    return int(late)


def contention(place: Path | str, contenders: int, requests: int) -> dict[str, Any]:
    """Run all contenders concurrently. Returns the sums of their results."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        each = [requests // contenders + (n < requests % contenders) for n in range(contenders)]
        command = [sys.executable, "-m", "bench.journal", "--contend", str(place), folder]
        started = [
            subprocess.Popen([*command, str(share)], stdout=subprocess.PIPE, text=True)
            for share in each
        ]
        said = [json.loads(one.communicate()[0] or "{}") for one in started]
        took = time.monotonic() - began
    if any(one.returncode != 0 for one in started):
        raise SystemExit("a contender failed")
    summed = {name: sum(one[name] for one in said) for name in ("acted", "refused", "doubled")}
    with Journal(place) as journal:
        each_steps = [journal.steps(one.id) for one in journal.operations()]
        written = sum(step.name == "act" for steps in each_steps for step in steps)
    return {"contenders": contenders, **summed, "steps": written, "seconds": round(took, 1)}


def disk(folder: Path, writes: int = 200) -> float:
    """Return the median time to write and sync 4 KiB on this disk, in milliseconds."""
    taken = []
    file = os.open(folder / "probe", os.O_CREAT | os.O_WRONLY, 0o600)
    for _ in range(writes):
        began = time.perf_counter()
        os.write(file, bytes(4096))
        os.fdatasync(file)
        taken.append(1000 * (time.perf_counter() - began))
    os.close(file)
    return round(statistics.median(taken), 2)


def main() -> None:
    """Measure both journals, print the figures and save them."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--steps", type=int, default=500)
    words.add_argument("--requests", type=int, default=1000)
    words.add_argument("--contenders", type=int, default=4)
    words.add_argument("--contend", nargs=3, help=argparse.SUPPRESS)
    words.add_argument("--json", type=Path)
    asked = words.parse_args()
    if asked.contend:
        place, folder, requests = asked.contend
        print(json.dumps(contend(locations.parse(place), Path(folder), int(requests))))
        return
    with tempfile.TemporaryDirectory() as name, journals(Path(name)) as made:
        flush = disk(Path(name))
        print(f"writing and syncing 4 KiB: {flush} ms")
        costs, contended = {}, {}
        for kind, where in made.items():
            costs[kind] = {**cost(where, asked.steps), "target_ms": TARGETS_MS[kind]}
            print(f"{kind:10}  a step: {costs[kind]}")
        for kind, where in made.items():
            contended[kind] = contention(where, asked.contenders, asked.requests)
            print(f"{kind:10}  contention: {contended[kind]}")
    if asked.json:
        told = {"disk_ms": flush, "steps": asked.steps, "step": costs, "contention": contended}
        asked.json.write_text(json.dumps(told, indent=2) + "\n")
    if any(one["doubled"] for one in contended.values()):
        raise SystemExit("two controllers acted on a guest at the same time")


if __name__ == "__main__":
    main()
