"""Evacuate a lab host with vmckpt, and with virsh, moving several guests at a time.

    sudo bench/all --only evacuation

The lab has three hosts; six busy guests run on the first. In each round, the methods evacuate the
first host in turn, and virsh moves the guests back after each. virsh moves half of the guests to
each of the other hosts, as an operator would, and encrypts as vmckpt does. The time from the first
move to the arrival of the last guest is compared, without the time for vmckpt's plan, because an
operator who uses virsh also plans first. The duration of the complete vmckpt command is recorded as
well. The limit is the least that any method sent, divided by the bandwidth of a plain socket.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import limits
from bench.figure import Figure, Result, best, median
from bench.hands import versions
from bench.migration import virsh
from bench.processes import cpu
from tests.lab.bench import Bench, finish
from vmckpt.units import parse_rate
from vmckpt_lab import lab, network

OURS, _LOADED = "vmckpt", "virsh, 2 at a time, beside another process"
MEMORY, DIRTY, LINK = "160MiB", "16MiB@4MiB/s", "400mbit"
AT_ONCE = (2, 3)
"""How many guests virsh moves at a time; moving them one by one takes 1.8 times as long."""


def move(bench: Bench, name: str, source: str, target: str) -> None:
    """Move a guest with virsh, with the flags that vmckpt uses."""
    tls = ("--abort-on-error", "--tls", "--tls-destination", target)
    subprocess.run(
        virsh(bench.plan, name, source, target, *tls), check=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,  # else virsh prompts
    )  # fmt: skip


def by_virsh(bench: Bench, names: Sequence[str], *, at_once: int) -> dict[str, float]:
    """Move all guests with virsh, half to each of the other hosts. Returns the duration."""
    targets = [("beta", "gamma")[number % 2] for number in range(len(names))]
    began = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda one: move(bench, one[0], "alpha", one[1]),
                      zip(names, targets, strict=True)))  # fmt: skip
    return {"moves_s": time.monotonic() - began}


def by_vmckpt(bench: Bench, names: Sequence[str]) -> dict[str, float]:
    """Run vmckpt evacuate. Returns the duration of the moves and of the complete command.

    Also returns the share of a core that the command's process uses during the moves.
    """
    began = time.monotonic()
    seen: list[tuple[float, float]] = []
    process = bench.start("evacuate", "alpha", "--yes", "--json")

    def watch() -> None:
        while process.poll() is None:
            seen.append((time.monotonic(), cpu(process.pid)))
            time.sleep(0.2)

    watcher = threading.Thread(target=watch)
    watcher.start()
    ended = finish(process)
    whole = time.monotonic() - began
    watcher.join()
    assert ended.code == 0, ended.err
    assert {one["guest"] for one in ended.json["moved"]} == set(names)
    bench.good("maintenance", "leave", "alpha")
    moves = ended.json["total_ms"] / 1000
    times, used = zip(*[one for one in seen if one[1]], strict=True)
    first = np.interp(times[-1] - moves, times, used)
    return {
        "moves_s": moves, "command_s": whole, "cpu": float(used[-1] - first) / moves,
    }  # fmt: skip


@contextmanager
def burning(share: float) -> Iterator[None]:
    """Use this share of a core in another process, as vmckpt's controller does."""
    code = (
        "import sys, time\nshare = float(sys.argv[1])\n"
        "while True:\n    end = time.thread_time() + share / 20\n"
        "    began = time.monotonic()\n    while time.thread_time() < end: pass\n"
        "    time.sleep(max(0.0, began + 0.05 - time.monotonic()))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(share)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def sent(bench: Bench) -> int:
    """Return how many bytes the first host has sent so far, as its cable's other end counts."""
    link = bench.plan.host("alpha").link
    return int(Path(f"/sys/class/net/{link}/statistics/rx_bytes").read_text())


def back(bench: Bench, names: Sequence[str]) -> None:
    """Move all guests back with virsh, two at a time."""
    away = [(name, at) for name in names for at in bench.where(name) if at != "alpha"]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: move(bench, one[0], one[1], "alpha"), away))


def run(rounds: int, guests: int) -> dict[str, Any]:
    """Run all methods in turn, in the reverse order in every second round."""
    name = f"bv{os.getpid()}"
    plan = lab.up(name, hosts=3)
    bench = Bench(plan)
    try:
        names = [f"web{number}" for number in range(1, guests + 1)]
        for one in names:
            bench.guest(one, memory=MEMORY, dirty=DIRTY, disk="16MiB")
        for each in plan.hosts:
            network.shape(plan, each.name, parse_rate(LINK))
        bandwidth, _ = limits.link(plan, "alpha", "beta", mib=64)
        methods: dict[str, Callable[[], dict[str, float]]] = {
            OURS: partial(by_vmckpt, bench, names),
            **{f"virsh, {at_once} at a time": partial(by_virsh, bench, names, at_once=at_once)
               for at_once in AT_ONCE},
        }  # fmt: skip

        def loaded() -> dict[str, float]:
            with burning(median(one["cpu"] for one in found[OURS]) or 0.0):
                return by_virsh(bench, names, at_once=AT_ONCE[0])

        methods[_LOADED] = loaded
        found: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
        for number in range(rounds):
            # The last method needs a measurement of the first.
            for method in list(methods)[:: -1 if number % 2 else 1]:
                time.sleep(2)
                before = sent(bench)
                told = methods[method]()
                told["sent"] = sent(bench) - before
                found[method].append(told)
                print(method, *(f"{k}={v:.1f}" for k, v in told.items()), flush=True)
                back(bench, names)
        for one in names:
            assert all(bench.ledgers(one).values()), one
        return {"bandwidth": bandwidth, "guests": guests, "rounds": found}
    finally:
        lab.down(name)


def figures(told: dict[str, Any]) -> tuple[Figure, ...]:
    """Return the figures. Pure."""
    took = {name: median(one["moves_s"] for one in each) for name, each in told["rounds"].items()}
    ours, loaded = took.pop(OURS) or 0.0, took.pop(_LOADED) or 0.0
    peer, peer_is = best(took)
    command = median(one["command_s"] for one in told["rounds"][OURS]) or 0.0
    least = min(one["sent"] for each in told["rounds"].values() for one in each) / told["bandwidth"]
    return (
        Figure(what=f"moves of {told['guests']} guests", unit="s", ours=ours, limit=least,
               limit_is="link", peer=peer, peer_is=peer_is),
        Figure(what="the same by virsh, beside a process that uses as much CPU time as vmckpt",
               unit="s", ours=loaded, limit=least, limit_is="link", peer=peer, peer_is=peer_is),
        Figure(what="the complete command", unit="s", ours=command, limit=least, limit_is="link"),
    )  # fmt: skip


def measure(*, quick: bool) -> Result:
    """Evacuate the host in turn; `quick`: one round of two guests."""
    told = run(1, 2) if quick else run(2, 6)
    return Result(figures=figures(told), versions=versions(), raw=told)
