"""Failovers at random moments, over and over: nothing that was seen may be forgotten.

    sudo .venv/bin/python -m bench.replication_kills 200 [--seed 1] [--json FILE [--more]]

Each turn a guest at work is protected, left alone for a random time, and then one thing happens
to its host: power off, all cables out, its agent or QEMU killed, its agent or libvirtd stopped
(SIGSTOP), the whole host frozen for ten seconds. Afterwards the guest must run on one host, no
QEMU of it may be left on the other, and its three ledgers must be whole: memory, disk, and what it
told the outside, which knows if a number was told twice or forgotten. Printed is what was lost
(RPO) and for how long the guest was silent. The first fault ends it, and leaves the lab as it is.
With --more it goes on after the turns that the file has: a campaign takes hours, and may be had in
parts.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.replication import GUEST, first_after, processes
from bench.snapshot_live import Hands
from vmckpt.lab import guests, host, lab, ledger, network
from vmckpt.lab.plan import LabPlan

_INTERVAL_MS = 200
_FROZEN = 10.0
_TTL_S = 2
_SETTLES = 3.0


class Fault(Exception):
    """What must not happen."""


def _signal(plan: LabPlan, word: bytes, number: signal.Signals) -> None:
    for one in processes(plan, "alpha", word):
        with suppress(ProcessLookupError):
            os.kill(one, number)


def _freeze(plan: LabPlan) -> None:
    """Every process of the host stands still, and goes on all at once."""
    found = [
        one for one in network.processes_in(plan.host("alpha").namespace)
        if one != host.first_process(plan.host("alpha"))
    ]  # fmt: skip
    for one in found:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGSTOP)
    time.sleep(_FROZEN)
    for one in found:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGCONT)


INJURIES: dict[str, Callable[[LabPlan], None]] = {
    "power": lambda plan: host.power_off(plan.host("alpha")),
    "cables": lambda plan: network.cut(plan, "alpha", guests_too=True),
    "agent killed": lambda plan: _signal(plan, b"vmckpt.agent.replica", signal.SIGKILL),
    "agent stopped": lambda plan: _signal(plan, b"vmckpt.agent.replica", signal.SIGSTOP),
    "libvirtd stopped": lambda plan: _signal(plan, b"libvirtd", signal.SIGSTOP),
    "frozen": _freeze,
    "QEMU killed": lambda plan: _signal(plan, b"qemu-system", signal.SIGKILL),
}


def turn(hands: Hands, seed: int) -> dict[str, Any]:
    """One of them. Raises Fault."""
    chance = random.Random(seed)
    plan = hands.plan
    what = chance.choice(sorted(INJURIES))
    guests.start(plan, GUEST, "alpha", memory="160MiB", dirty="32MiB@10MiB/s", disk="32MiB",
                 shared_memory=True)  # fmt: skip
    words = ("--interval", f"{_INTERVAL_MS}ms", "--failover", "automatic", "--ttl", f"{_TTL_S}s")
    hands.vmckpt("protect", GUEST, "--to", "beta", "--json", *words)
    time.sleep(chance.uniform(0.3, 4.0))
    died = time.monotonic()
    INJURIES[what](plan)
    heard = first_after(plan, died) if what != "agent killed" else died
    time.sleep(_SETTLES)
    _signal(plan, b"libvirtd", signal.SIGCONT)
    _signal(plan, b"vmckpt.agent.replica", signal.SIGCONT)
    network.heal(plan, "alpha")
    running = [
        name for name in ("alpha", "beta") for one in processes(plan, name, b"qemu-system")
        if not _waits(one)
    ]  # fmt: skip
    told = _told(hands)
    found = {"seed": seed, "what": what, "silent_s": heard - died, "behind_s": told.get("behind_s"),
             "outcome": told.get("outcome"), "why": told.get("why")}  # fmt: skip
    lab.heal(plan, "alpha")
    audit = ledger.audit(plan, GUEST)
    if not audit.whole:
        raise Fault(f"{found}: {[entry.text for entry in audit.entries if not entry.whole]}")
    if told.get("outcome") == "failed-over" and running.count("alpha"):
        raise Fault(f"{found}: QEMU runs on {running}")
    hands.vmckpt("recover", "--json")
    with suppress(Exception):
        hands.vmckpt("unprotect", GUEST)
    guests.remove(plan, GUEST)
    return found


def _waits(process: int) -> bool:
    """Whether a QEMU was started as a standby; once it runs the guest it is one no more, and counts
    by what its agent says."""
    with suppress(OSError):
        return b"defer" in Path(f"/proc/{process}/cmdline").read_bytes()
    return True


def _told(hands: Hands) -> dict[str, Any]:
    found = hands.vmckpt("status", "--json")
    return dict((found[0]["says"].get("beta") or {}) if found else {})


def main() -> None:
    """Turn after turn; what was found is printed, and kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("turns", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--more", action="store_true", help="Keep the turns that the file has.")
    chosen = parser.parse_args()
    found: list[dict[str, Any]] = []
    if chosen.more and chosen.json is not None and chosen.json.exists():
        found = json.loads(chosen.json.read_text())["turns"]
    first = max((one["seed"] + 1 for one in found), default=chosen.seed)
    name = f"bk{os.getpid()}"
    plan = lab.up(name, with_witness=True)
    hands = Hands(plan, plan.folder / "identity")
    try:
        for seed in range(first, first + chosen.turns):
            found.append(turn(hands, seed))
            sys.stdout.write(f"{len(found)}: {json.dumps(found[-1])}\n")
            sys.stdout.flush()
            if chosen.json is not None:
                told = {"summary": summary(found), "turns": found}
                chosen.json.write_text(json.dumps(told, indent=1) + "\n")
    except Fault as exc:  # what is there tells how it came to that
        sys.stdout.write(f"FAULT {exc}\nthe lab is left: vmckpt lab down --name {name}\n")
        sys.exit(1)
    except BaseException:
        lab.down(name)
        raise
    lab.down(name)
    sys.stdout.write(json.dumps(summary(found)) + "\n")


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What came of all turns; a fault would have ended them."""
    behind = [one["behind_s"] for one in found if one["behind_s"] is not None]
    return {
        "turns": len(found), "seed": found[0]["seed"], "interval_ms": _INTERVAL_MS,
        "lease_s": _TTL_S, "failovers": len(behind), "faults": 0,
        "behind_median_s": statistics.median(behind) if behind else None,
        "behind_worst_s": max(behind, default=None),
        "behind_over_two_intervals": sum(1e3 * one > 2 * _INTERVAL_MS for one in behind),
        "by_injury": dict(sorted(Counter(one["what"] for one in found).items())),
    }  # fmt: skip


if __name__ == "__main__":
    main()
