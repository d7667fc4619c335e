"""Evacuate a lab host with vmckpt, and with virsh, moving several guests at a time.

    sudo bench/all --only evacuation

The lab has three hosts; eight busy guests run on the first. In each round, the methods evacuate the
first host in turn, and virsh moves the guests back after each. virsh moves half of the guests to
each of the other hosts, as an operator would, and encrypts as vmckpt does. The time from the first
move to the arrival of the last guest is compared, without the time for vmckpt's plan, because an
operator who uses virsh also plans first. The duration of the complete vmckpt command is recorded as
well. The limit is the least that any method sent, divided by the bandwidth of a plain socket.
"""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench import limits
from bench.figure import Figure, Result, best, median
from bench.hands import versions
from bench.migration import virsh
from tests.lab.bench import Bench
from vmckpt.units import parse_rate
from vmckpt_lab import lab, network

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
    """Run vmckpt evacuate. Returns the duration of the moves and of the complete command."""
    began = time.monotonic()
    done = bench.good("evacuate", "alpha", "--yes", "--json").json
    whole = time.monotonic() - began
    assert {one["guest"] for one in done["moved"]} == set(names)
    bench.good("maintenance", "leave", "alpha")
    return {"moves_s": done["total_ms"] / 1000, "command_s": whole}


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
    """Run all methods in turn; each is first and last equally often."""
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
            "vmckpt": partial(by_vmckpt, bench, names),
            **{f"virsh, {at_once} at a time": partial(by_virsh, bench, names, at_once=at_once)
               for at_once in AT_ONCE},
        }  # fmt: skip
        found: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
        for number in range(rounds):
            first = number % len(methods)
            for method in [*list(methods)[first:], *list(methods)[:first]]:
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
    ours = took.pop("vmckpt") or 0.0
    peer, peer_is = best(took)
    command = median(one["command_s"] for one in told["rounds"]["vmckpt"]) or 0.0
    least = min(one["sent"] for each in told["rounds"].values() for one in each) / told["bandwidth"]
    return (
        Figure(what=f"moves of {told['guests']} guests", unit="s", ours=ours, limit=least,
               limit_is="link", peer=peer, peer_is=peer_is),
        Figure(what="the complete command", unit="s", ours=command, limit=least, limit_is="link"),
    )  # fmt: skip


def measure(*, quick: bool) -> Result:
    """Evacuate the host in turn; `quick`: one round of two guests."""
    told = run(1, 2) if quick else run(2, 8)
    return Result(figures=figures(told), versions=versions(), raw=told)
