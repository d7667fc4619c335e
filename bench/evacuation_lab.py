"""Evacuate a lab host with vmckpt, and with virsh, moving guests one by one and two at a time.

    sudo .venv/bin/python -m bench.evacuation_lab [--rounds 3] [--guests 8] [--link 400mbit]
        [--plain] [--json bench/results/evacuation_lab.json]

The lab has three hosts; eight busy guests run on the first. In each round, the three methods
evacuate the first host in turn, and virsh moves the guests back after each. virsh moves half of the
guests to each of the other hosts, as an operator would, and encrypts as vmckpt does if hosts have
certificates; with --plain, no method encrypts. The time from the first move to the arrival of the
last guest is compared, without the time for vmckpt's plan, because an operator who uses virsh also
plans first. The duration of the complete vmckpt command is recorded as well.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.lab.bench import Bench
from vmckpt.units import parse_rate
from vmckpt_lab import lab, network

MEMORY, DIRTY = "160MiB", "16MiB@4MiB/s"
MAINTENANCE = Path(__file__).parents[1] / "policies/maintenance.yaml"


def virsh(bench: Bench, name: str, source: str, target: str, *, plain: bool = False) -> None:
    """Move a guest with virsh, with the flags that vmckpt uses."""
    there = bench.plan.host(target).address
    tls = [] if plain else ["--tls", "--tls-destination", target]
    subprocess.run(
        ["virsh", "-c", f"qemu+tcp://{bench.plan.host(source).address}/system", "migrate",
         "--live", "--p2p", "--persistent", "--undefinesource", "--unsafe", "--abort-on-error",
         *tls, name, f"qemu+tcp://{there}/system", "--migrateuri", f"tcp://{there}"],
        check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,  # else virsh prompts
    )  # fmt: skip


def by_virsh(bench: Bench, names: Sequence[str], *, at_once: int, plain: bool) -> dict[str, float]:
    """Move all guests with virsh, half to each of the other hosts. Returns the duration."""
    targets = [("beta", "gamma")[number % 2] for number in range(len(names))]
    began = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda one: virsh(bench, one[0], "alpha", one[1], plain=plain),
                      zip(names, targets, strict=True)))  # fmt: skip
    return {"moves_s": time.monotonic() - began}


def _without_tls(bench: Bench) -> Path:
    """Write the policy maintenance with TLS off. Returns the file's path."""
    policy = bench.plan.folder / "plain.yaml"
    policy.write_text(MAINTENANCE.read_text().replace("tls: preferred", "tls: off"))
    return policy


def by_vmckpt(bench: Bench, names: Sequence[str], *, plain: bool) -> dict[str, float]:
    """Run vmckpt evacuate. Returns the duration of the moves and of the complete command."""
    words = ["--policy", str(_without_tls(bench))] if plain else []
    began = time.monotonic()
    done = bench.good("evacuate", "alpha", "--yes", "--json", *words).json
    whole = time.monotonic() - began
    assert {one["guest"] for one in done["moved"]} == set(names)
    bench.good("maintenance", "leave", "alpha")
    return {"moves_s": done["total_ms"] / 1000, "command_s": whole}


def back(bench: Bench, names: Sequence[str]) -> None:
    """Move all guests back with virsh, one after the other."""
    for name in names:
        (at,) = bench.where(name)
        if at != "alpha":
            virsh(bench, name, at, "alpha")


def run(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Run all methods in turn; each is first and last equally often."""
    plan = lab.up("evacuation", hosts=3, say=print)
    bench = Bench(plan)
    try:
        names = [f"web{number}" for number in range(1, args.guests + 1)]
        for name in names:
            bench.guest(name, memory=MEMORY, dirty=DIRTY, disk="16MiB")
        for one in plan.hosts:
            network.shape(plan, one.name, parse_rate(args.link))
        ways: dict[str, Callable[[], dict[str, float]]] = {
            "vmckpt": partial(by_vmckpt, bench, names, plain=args.plain),
            "serial": partial(by_virsh, bench, names, at_once=1, plain=args.plain),
            "two at a time": partial(by_virsh, bench, names, at_once=2, plain=args.plain),
        }
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for number in range(args.rounds):
            order = list(ways)[number % 3 :] + list(ways)[: number % 3]
            for way in order:
                time.sleep(2)
                told = ways[way]()
                found[way].append(told)
                print(f"{way:<14}" + " ".join(f"{k}={v:.1f}" for k, v in told.items()), flush=True)
                back(bench, names)
        for name in names:
            assert all(bench.ledgers(name).values()), name
        return found
    finally:
        lab.down("evacuation")


def main() -> None:
    """Measure all methods, print the medians and save the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--guests", type=int, default=8)
    parser.add_argument("--link", default="400mbit")
    parser.add_argument("--plain", action="store_true", help="do not encrypt")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = run(args)
    medians = {way: statistics.median(one["moves_s"] for one in told)
               for way, told in found.items()}  # fmt: skip
    best = min(medians["serial"], medians["two at a time"])
    results: dict[str, Any] = {
        "guests": args.guests, "link": args.link, "memory": MEMORY, "dirty": DIRTY,
        "encrypted": not args.plain, "rounds": found, "median_s": medians,
        "ratio": round(medians["vmckpt"] / best, 3),
    }  # fmt: skip
    for way, median in medians.items():
        print(f"{way:<14} {median:6.1f} s  {median / best:.2f} of the faster virsh method")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    sys.exit(0)


if __name__ == "__main__":
    main()
