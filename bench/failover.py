"""How long a protected guest is silent after its host's power is cut, next to a cold start.

    sudo bench/all --only failover

The standby takes over by the lease of 1 s, which the lease store does not grant earlier. The
competing method is what Pacemaker and oVirt do: the guest boots on the other host. It gets the time
to detect the failure and to fence the host for free, and it loses all memory. `bench/replication.py
--only failover --turns 100` is the campaign that shows that nothing is lost.
"""

import os
import time
from typing import Any

from bench import limits, replication
from bench.figure import Figure, Result, median
from bench.hands import Hands, versions
from vmckpt_lab import guests, lab

LEASE = 1.0
"""Lifetime of the lease, in seconds."""


def booted(hands: Hands) -> float:
    """Return how long the guest takes from its definition to its first answer, in seconds."""
    began = time.monotonic()
    guests.start(hands.plan, "cold", "beta", memory="256MiB", disk="64MiB", boot=True)
    took = time.monotonic() - began
    guests.remove(hands.plan, "cold")
    return took


def figures(told: dict[str, Any], cold: list[float]) -> tuple[Figure, ...]:
    """Return the figures. Pure."""
    turns = told["turns"]
    decided = median(turn["runs_after_ms"] for turn in turns)
    return (
        Figure(what="power-off to the first answer, lease of 1 s", unit="s",
               ours=told["silent_median_s"], limit=LEASE + told["round_trip_ms"] / 1e3,
               limit_is="the lease and a round trip", peer=median(cold),
               peer_is="cold start, already decided"),
        Figure(what="the same, longest", unit="s", ours=told["silent_worst_s"],
               limit=LEASE + told["round_trip_ms"] / 1e3, limit_is="the lease and a round trip",
               peer=max(cold), peer_is="cold start, already decided"),
        *(() if decided is None else (
            Figure(what="of this, from the decision until the guest runs", unit="ms", ours=decided,
                   limit=told["round_trip_ms"], limit_is="round trip"),)),
    )  # fmt: skip


def measure(*, quick: bool) -> Result:
    """Cut the power repeatedly, in turn with cold starts."""
    name = f"bf{os.getpid()}"
    plan = lab.up(name, with_witness=True)
    try:
        hands = Hands(plan, plan.folder / "identity")
        trip = 1e3 * limits.link(plan, "alpha", "beta", mib=16)[1]
        cold, turns = [], []
        for number in range(1 if quick else 5):
            cold.append(booted(hands))
            turns += replication.failover(hands, 1, number)["turns"]
        told = {"round_trip_ms": trip, **replication.failover_figures(turns), "turns": turns}
    finally:
        lab.down(name)
    if told["whole"] != len(turns):
        raise SystemExit("the ledgers do not agree")
    return Result(figures=figures(told, cold), versions=versions(), raw={**told, "cold_s": cold})
