"""Cut the power of a Debian guest's host again and again, and count the commits that are missing.

    sudo .venv/bin/python -m bench.debian_failover [--turns 10] [--seed 1]
        [--json bench/results/debian_failover.json]

The guest is exactly as virt-install defines it; its disk is private to its host. PostgreSQL runs
under pgbench, and a client outside records each acknowledged commit. In each turn the guest is
protected, its host loses its power at a random moment, and the standby takes over by the lease.
Then all acknowledged commits must be in the database. The former host comes back, and the next turn
protects the guest in the other direction.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.hands import Hands
from bench.replication import failover_figures, runs_after
from vmckpt_lab import guests, host, lab
from vmckpt_lab.debian import commits
from vmckpt_lab.debian import guest as debian
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.plan import LabPlan

GUEST = "db1"
_OTHER = {"alpha": "beta", "beta": "alpha"}
_WITHIN = 120.0


class PowerCuts:
    """A Debian guest in a lab with a lease store, and failovers of this guest."""

    def __init__(self, plan: LabPlan, seed: int, *, ttl: float) -> None:
        self._plan, self._ttl = plan, ttl
        self._hands = Hands(plan, plan.folder / "identity")
        self._random = random.Random(seed)
        self._guest = debian.start(plan, GUEST, "alpha", private_disk=True)
        self._place = "alpha"
        self._protected_before = False

    def turn(self) -> dict[str, Any]:
        """Protect the guest, cut its host's power, and check the database."""
        ready = self._protect()
        waited = self._random.uniform(1.0, 6.0)
        time.sleep(waited)
        died = time.monotonic()
        host.power_off(self._plan.host(self._place))
        silent = self._silence(died)
        (told,) = self._hands.vmckpt("status", GUEST, "--json")
        self._place = _OTHER[self._place]
        why = str(told["says"][self._place].get("why"))
        audit = debian.audit(self._plan, self._guest)
        self._come_back()
        return {
            "ready_s": ready["took"], "waited_s": waited, "silent_s": silent,
            "runs_after_ms": runs_after(why), "why": why, "ledgers_whole": audit.whole,
            "ledgers": {entry.name: entry.text for entry in audit.entries},
        }  # fmt: skip

    def _protect(self) -> dict[str, Any]:
        where = ["--reverse"] if self._protected_before else ["--to", _OTHER[self._place]]
        self._protected_before = True
        lease = ["--failover", "automatic", "--ttl", f"{self._ttl:g}s"]
        return dict(self._hands.vmckpt("protect", GUEST, *where, *lease, "--json"))

    def _silence(self, died: float) -> float:
        """Wait for a commit after the power cut. Returns how long there was none, in seconds."""
        file, give_up = guests.commits_file(self._plan, GUEST), Deadline(_WITHIN)
        while not give_up.passed():
            known = [at for _, at in commits.acknowledged(file.read_text())]
            # Nothing of a dead host arrives a tenth of a second later.
            after = [at for at in known if at > died + 0.1]
            if after:
                return after[0] - max(at for at in known if at < after[0])
            time.sleep(0.05)
        raise SystemExit(f"{GUEST} committed nothing within {_WITHIN:g} s of the power cut")

    def _come_back(self) -> None:
        lab.heal(self._plan, _OTHER[self._place])
        self._hands.vmckpt("recover", "--json")


def main(words: Sequence[str] | None = None) -> None:
    """Run the turns, print the results and save them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ttl", type=float, default=2.0, help="lifetime of the lease, in seconds")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(words)
    name = f"bd{os.getpid()}"
    plan = lab.up(name, with_witness=True)
    turns: list[dict[str, Any]] = []
    try:
        cuts = PowerCuts(plan, chosen.seed, ttl=chosen.ttl)
        for number in range(chosen.turns):
            turns.append(cuts.turn())
            print(f"  {number + 1}: {turns[-1]}", flush=True)
    finally:
        lab.down(name)
        if turns:
            found = {
                "seed": chosen.seed,
                "ttl_s": chosen.ttl,
                **failover_figures(turns),
                "each": turns,
            }
            sys.stdout.write(json.dumps(found, indent=1) + "\n")
            if chosen.json is not None:
                chosen.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
