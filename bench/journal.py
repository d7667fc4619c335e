"""Measure the cost of a step in the journal, and check that controllers exclude each other.

A step is an intent and its conclusion: two transactions, each on disk before the call returns. The
contenders are processes that acquire the lease on the same guest repeatedly. While a contender
holds the lease, it checks, without using the journal, that no other contender is acting, and that
its token is greater than all earlier tokens.

    sudo bench/all --only journal
"""

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

from bench import limits
from bench.figure import Figure, Result
from tests.support import postgres
from vmckpt.errors import GuestLocked
from vmckpt.journal import location as locations
from vmckpt.journal.records import NewOperation, StepState
from vmckpt.journal.store import Journal
from vmckpt.units import Seconds

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
        command = [sys.executable, "-m", "bench.journal", str(place), folder]
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


def measure(*, quick: bool) -> Result:
    """Measure both journals; `quick`: fewer steps."""
    steps, requests = (50, 100) if quick else (500, 1000)
    with tempfile.TemporaryDirectory() as name, journals(Path(name)) as made:
        sync = 1e3 * limits.fsync(Path(name))
        costs = {kind: cost(where, steps) for kind, where in made.items()}
        contended = {kind: contention(where, 4, requests) for kind, where in made.items()}
    if any(one["doubled"] for one in contended.values()):
        raise SystemExit("two controllers acted on a guest at the same time")
    rows = tuple(
        Figure(what=f"a step, {kind}", unit="ms", ours=one["median_ms"], limit=2 * sync,
               limit_is="two syncs")
        for kind, one in costs.items()
    )  # fmt: skip
    raw = {"sync_ms": sync, "steps": steps, "step": costs, "contention": contended}
    return Result(figures=rows, raw=raw)


if __name__ == "__main__":
    place_, folder_, requests_ = sys.argv[1:]
    print(json.dumps(contend(locations.parse(place_), Path(folder_), int(requests_))))
