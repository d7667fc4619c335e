"""The cost of protecting a guest: the pause of each epoch, and the work that the guest loses.

    sudo bench/all --only epochs

A guest of 256 MiB writes 20 MiB/s to memory, and constantly writes to its disk and network, under
TCG on the cores that the agents also use; larger guests write the same. Pauses are also measured
without looking for changed pages, and with nothing between QEMU's `stop` and `cont`. There is no
competing program: Remus needs Xen, and COLO a QEMU started for COLO, which libvirt does not do.
"""

import os
from pathlib import Path
from typing import Any

from bench import hands as lab_hands
from bench import limits, replication
from bench.figure import Figure, Result
from bench.hands import Hands, versions
from vmckpt_lab import guests, lab


def still(hands: Hands) -> float:
    """Return the pause of `stop` and `cont` for this guest, in milliseconds."""
    replication.start(hands.plan)
    try:
        return float(hands.inside("still", replication.GUEST, "50")["ms"])
    finally:
        guests.remove(hands.plan, replication.GUEST)


def figures(told: dict[str, Any]) -> tuple[Figure, ...]:
    """Return the figures. Pure."""
    pause = {"limit": told["still_ms"], "limit_is": "stop and cont"}
    state = told["bare"]["none"]["pause"]
    commit = {"limit": told["fsync_ms"] + told["round_trip_ms"], "limit_is": "round trip and sync"}
    return (
        *(Figure(what=f"pause per epoch, {size}", unit="ms",
                 ours=1e3 * one["pause_s"], **pause)
          for size, one in told["sizes"].items()),
        Figure(what="pause without looking for changed pages", unit="ms", ours=state, **pause),
        *(Figure(what=f"time to send and commit an epoch, {size}", unit="ms",
                 ours=1e3 * one["median"]["send_s"], **commit)
          for size, one in told["sizes"].items()),
        *(Figure(what=f"work that the guest completes, {every} between epochs", unit="%",
                 ours=100 * one["work"], limit=100.0, limit_is="unprotected")
          for every, one in told["curve"].items()),
        *(Figure(what=f"memory of the primary's agent, {size}", unit="MiB",
                 ours=one["rss_mib"]["alpha"])
          for size, one in told["sizes"].items()),
    )  # fmt: skip


def measure(*, quick: bool) -> Result:
    """Protect guests in a lab; `quick`: one size and one interval."""
    name = f"be{os.getpid()}"
    plan = lab.up(name, with_witness=True)
    try:
        hands = lab_hands.Hands(plan, plan.folder / "identity")
        told: dict[str, Any] = {
            "still_ms": still(hands),
            "round_trip_ms": 1e3 * limits.link(plan, "alpha", "beta", mib=16)[1],
            "fsync_ms": 1e3 * limits.fsync(Path(plan.shared)),
            "sizes": replication.sizes(hands, ("256MiB",) if quick else replication.SIZES),
            "bare": replication.bare(hands),
            "curve": replication.curve(hands, (100,) if quick else (100, 1000)),
        }
    finally:
        lab.down(name)
    return Result(figures=figures(told), versions=versions(), raw=told)
