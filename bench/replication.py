"""Measure the replication of a busy guest: the cost of an epoch, and the speed of a failover.

    sudo .venv/bin/python -m bench.replication [--minutes 10] [--turns 5] [--seed 1]
        [--only pause,sizes,bare,curve,loaded,failover,moves]
        [--json bench/results/replication.json]

The lab has two hosts and a lease store. A guest with 256 MiB of memory writes 20 MiB/s to memory,
and constantly writes to its disk and network, under TCG on the cores that the agents also use.

* pause: protect the guest for some minutes, with 100 ms between epochs. Measures the pauses, the
  parts of a pause, and whether the agents' memory grows.
* sizes: protect guests of 256 MiB, 4 GiB and 8 GiB, which all write the same, for half a minute
  each, with 100 ms between epochs. Measures the pause, and the memory of the primary's agent.
* bare: capture epochs of an unprotected guest, in turns with write tracking, with a comparison of
  memory, and with neither.
* curve: measure the guest's work for several intervals, relative to its work before the protection.
* loaded: keep each core busy with another program, with automatic failover by the lease. The
  standby must not take over, and the guest must not be stopped.
* failover: cut the primary's power repeatedly. Measures the time from the decision until the guest
  runs, and from the power cut to the guest's first datagram outside. `--only failover --turns 100`
  is the proof that nothing is lost.
* moves: move the guest there and back, alternately by epochs (`migrate --mode checkpoint`) and by
  pre-copy. Measures the downtime that the command reports, and the longest silence outside.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.hands import Hands, Work
from vmckpt_lab import guests, host, lab, ledger, network
from vmckpt_lab.observer import client
from vmckpt_lab.plan import LabPlan

PHASES = ("pause", "sizes", "bare", "curve", "loaded", "failover", "moves")
SIZES = ("256MiB", "4GiB", "8GiB")
INTERVALS = (50, 100, 250, 500, 1000)
GUEST = "web1"
_BEFORE = 10.0
_LOOKS = 5.0
_WITHIN = 30.0


def protect(hands: Hands, interval: str, *more: str) -> dict[str, Any]:
    """Protect the guest. Returns the command's report."""
    words = ["protect", GUEST, "--to", "beta", "--interval", interval, "--json", *more]
    return dict(hands.vmckpt(*words))


def primary(hands: Hands) -> dict[str, Any]:
    """Return the status that the primary's agent reports."""
    (one,) = hands.vmckpt("status", GUEST, "--json")
    return dict(one["says"]["alpha"])


def start(plan: LabPlan, *, memory: str = "256MiB", shared: bool = False) -> None:
    """Start the guest that is used for all figures. `shared`: its memory is in a file."""
    wishes: dict[str, Any] = {"memory": memory, "dirty": "64MiB@20MiB/s", "disk": "64MiB"}
    guests.start(plan, GUEST, "alpha", shared_memory=shared, **wishes)
    time.sleep(5.0)


def pause(hands: Hands, minutes: float) -> dict[str, Any]:
    """Measure epochs 100 ms apart, for some minutes."""
    start(hands.plan)
    ready = protect(hands, "100ms")
    looks = []
    until = time.monotonic() + minutes * 60
    while time.monotonic() < until:
        time.sleep(min(_LOOKS * 6, max(1.0, until - time.monotonic())))
        told = primary(hands)
        looks.append(
            {
                "epoch": told["epoch"], "interval_s": told["interval_s"],
                "pause_s": told["median"]["pause_s"], "p99_s": told["pause_p99_s"],
                "rss_mib": rss(hands.plan), "median": told["median"],
            }
        )  # fmt: skip
        print(f"  {looks[-1]['epoch']}: {1e3 * looks[-1]['pause_s']:.1f} ms", flush=True)
    hands.vmckpt("unprotect", GUEST)
    whole = hands.gone(GUEST)
    return {"ready_s": ready["took"], "looks": looks, "ledgers_whole": whole}


def sizes(hands: Hands, of: Sequence[str] = SIZES) -> dict[str, Any]:
    """Measure the pause of guests that differ only in the size of their memory."""
    found = {}
    for size in of:
        start(hands.plan, memory=size)
        ready = protect(hands, "100ms")
        time.sleep(_WITHIN)
        told = primary(hands)
        found[size] = {
            "ready_s": ready["took"], "expected_pause_s": ready["expected_pause"],
            "pause_s": told["median"]["pause_s"], "p99_s": told["pause_p99_s"],
            "median": told["median"], "rss_mib": rss(hands.plan),
        }  # fmt: skip
        print(f"  {size}: {1e3 * told['median']['pause_s']:.1f} ms", flush=True)
        hands.vmckpt("unprotect", GUEST)
        found[size]["ledgers_whole"] = hands.gone(GUEST)
    return found


def bare(hands: Hands) -> dict[str, Any]:
    """Measure the pause of an epoch with each method to find changed pages, on the host itself."""
    start(hands.plan, shared=True)
    words = (GUEST, "/dev/shm/vmckpt-bench-bare", "100")
    found = dict(hands.inside(*words, program="bench.replication_inside"))
    return {**found, "ledgers_whole": hands.gone(GUEST)}


def rss(plan: LabPlan) -> dict[str, float]:
    """Return the anonymous memory of the agents on each host, in MiB."""
    found = {}
    for one in plan.hosts:
        total = 0
        for process in processes(plan, one.name, b"vmckpt.agent.replication.main"):
            rolled = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += sum(
                int(line.split()[1]) for line in rolled.splitlines() if line.startswith("Anonymous")
            )
        found[one.name] = total / 1024
    return found


def processes(plan: LabPlan, name: str, word: bytes) -> list[int]:
    """Return the processes of a host whose command lines contain a word."""
    found = []
    for one in network.processes_in(plan.host(name).namespace):
        try:
            if word in Path(f"/proc/{one}/cmdline").read_bytes():
                found.append(one)
        except OSError:
            continue
    return found


def curve(hands: Hands, intervals: Sequence[int] = INTERVALS) -> dict[str, Any]:
    """Compare the guest's work while protected with its work before, for each interval in ms."""
    found = {}
    for interval in intervals:
        start(hands.plan)
        with Work(hands.plan, GUEST) as work:
            began = time.clock_gettime(time.CLOCK_MONOTONIC)
            time.sleep(_BEFORE)
            ended = time.clock_gettime(time.CLOCK_MONOTONIC)
            protect(hands, f"{interval}ms")
            time.sleep(3.0)
            first = time.clock_gettime(time.CLOCK_MONOTONIC)
            time.sleep(2 * _BEFORE)
            last = time.clock_gettime(time.CLOCK_MONOTONIC)
            told = primary(hands)
        share = work.rate(first, last) / work.rate(began, ended)
        found[f"{interval}ms"] = {
            "work": share, "pause_s": told["median"]["pause_s"],
            "interval_s": told["interval_s"], "bytes": told["median"]["bytes"],
            "busy_s": told["median"]["busy_s"],
        }  # fmt: skip
        print(f"  {interval} ms: {share:.0%} of its work", flush=True)
        hands.vmckpt("unprotect", GUEST)
        hands.gone(GUEST)
    return found


def loaded(hands: Hands, minutes: float) -> dict[str, Any]:
    """Protect the guest with a lease while other processes keep all cores busy."""
    start(hands.plan)
    protect(hands, "auto", "--failover", "automatic")
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    looks = []
    try:
        until = time.monotonic() + minutes * 60
        while time.monotonic() < until:
            time.sleep(min(_LOOKS * 6, max(1.0, until - time.monotonic())))
            (one,) = hands.vmckpt("status", GUEST, "--json")
            ours, theirs = one["says"]["alpha"], one["says"]["beta"]
            looks.append(
                {
                    "phase": ours.get("phase"), "epoch": ours.get("epoch"),
                    "agent": ours.get("process"), "backup_agent": theirs.get("process"),
                    "outcomes": [one.get("outcome") for one in (ours, theirs)],
                    "rpo_worst_s": ours.get("rpo_worst_s"), "interval_s": ours.get("interval_s"),
                    "pause_s": (ours.get("median") or {}).get("pause_s"),
                }
            )  # fmt: skip
            print(f"  {looks[-1]}", flush=True)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    hands.vmckpt("unprotect", GUEST)
    whole = hands.gone(GUEST)
    return {
        "minutes": minutes, "looks": looks, "ledgers_whole": whole,
        "failovers_or_stops": sum(any(one["outcomes"]) for one in looks),
        "agents_started_again": len({one["agent"] for one in looks}) - 1,
    }  # fmt: skip


def failover(hands: Hands, turns: int, seed: int) -> dict[str, Any]:
    """Cut the primary's power at a random moment, so that the standby takes over."""
    plan, moment = hands.plan, random.Random(seed)
    found: list[dict[str, Any]] = []
    for _ in range(turns):
        start(plan)
        protect(hands, "100ms", "--failover", "automatic", "--ttl", "1s")
        time.sleep(moment.uniform(3.0, 4.0))
        died = time.monotonic()
        host.power_off(plan.host("alpha"))
        heard = first_after(plan, died)
        time.sleep(1.0)
        told = said(hands)
        whole = ledger.audit(plan, GUEST).whole
        why = str(told.get("why"))
        found.append({"silent_s": heard - died, "runs_after_ms": runs_after(why), "why": why,
                      "ledgers_whole": whole})  # fmt: skip
        print(f"  {1e3 * (heard - died):.0f} ms, ledgers whole: {whole}: {why}", flush=True)
        lab.heal(plan, "alpha")
        hands.vmckpt("recover", "--json")
        guests.remove(plan, GUEST)
    return {"seed": seed, **failover_figures(found), "turns": found}


def runs_after(why: str) -> float | None:
    """Return how long after the decision the guest ran, in milliseconds; None if it did not."""
    told = re.search(r"running after ([0-9.]+) ms", why)
    return float(told[1]) if told else None


def failover_figures(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all failovers."""
    silent = [turn["silent_s"] for turn in turns]
    runs = [turn["runs_after_ms"] for turn in turns if turn["runs_after_ms"] is not None]
    return {
        "failovers": len(runs), "whole": sum(turn["ledgers_whole"] for turn in turns),
        "silent_median_s": statistics.median(silent), "silent_worst_s": max(silent),
        "runs_after_median_ms": statistics.median(runs) if runs else None,
        "runs_after_worst_ms": max(runs, default=None),
    }  # fmt: skip


def moves(hands: Hands, turns: int) -> dict[str, Any]:
    """Move the guest there and back, alternately by epochs and by pre-copy.

    The first move of each kind is a warm-up.
    """
    plan, other = hands.plan, {"alpha": "beta", "beta": "alpha"}
    start(plan)
    place = "alpha"
    found: dict[str, list[dict[str, Any]]] = {"checkpoint": [], "precopy": []}
    for turn in range(turns + 1):
        for mode, rows in found.items():
            place = other[place]
            began = time.monotonic()
            words = ("migrate", GUEST, "--to", place, "--mode", mode, "--tls", "off", "--json")
            told = hands.vmckpt(*words)
            seen = client.status(plan.observer_socket, GUEST, since=began, until=time.monotonic())
            row = {
                "downtime_ms": told["downtime_ms"], "silent_ms": 1e3 * seen.blackout,
                "total_ms": told["total_ms"], "sent_bytes": told["bytes_transferred"],
            }  # fmt: skip
            if turn:
                rows.append(row)
            print(f"  {mode}: {row}", flush=True)
            time.sleep(2.0)
    whole = hands.gone(GUEST)
    medians = {
        mode: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for mode, rows in found.items()
    }
    return {"medians": medians, "turns": found, "ledgers_whole": whole}


def first_after(plan: LabPlan, died: float) -> float:
    """Return when the guest's first datagram after the power cut arrived, in monotonic seconds."""
    while time.monotonic() < died + _WITHIN:
        now = time.monotonic()
        seen = client.status(plan.observer_socket, GUEST, since=died, until=now)
        if seen.answered_at is not None and seen.answered_at > died + 0.1:
            return died + seen.blackout
        time.sleep(0.01)
    raise SystemExit(f"the observer received nothing from the guest within {_WITHIN:g} s")


def said(hands: Hands) -> dict[str, Any]:
    """Return the backup's report on the failover."""
    (one,) = hands.vmckpt("status", GUEST, "--json")
    return dict(one["says"]["beta"])


def main(words: Sequence[str] | None = None) -> None:
    """Run the phases, print the results and save them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1, help="of the moments of power cuts")
    parser.add_argument("--only", default=",".join(PHASES))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(words)
    name = f"br{os.getpid()}"
    plan = lab.up(name, with_witness=True)
    found: dict[str, Any] = {}
    try:
        hands = Hands(plan, plan.folder / "identity")
        steps: dict[str, Callable[[], dict[str, Any]]] = {
            "pause": lambda: pause(hands, chosen.minutes),
            "sizes": lambda: sizes(hands),
            "bare": lambda: bare(hands),
            "curve": lambda: curve(hands),
            "loaded": lambda: loaded(hands, chosen.minutes),
            "failover": lambda: failover(hands, chosen.turns, chosen.seed),
            "moves": lambda: moves(hands, chosen.turns),
        }
        for step in chosen.only.split(","):
            print(step, flush=True)
            found[step] = steps[step]()
    finally:
        lab.down(name)
        if chosen.json is not None and found:
            kept = json.loads(chosen.json.read_text()) if chosen.json.exists() else {}
            chosen.json.write_text(json.dumps({**kept, **found}, indent=1) + "\n")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
