"""Kill the controller or the agent during a snapshot or a restore of a real guest in a lab.

After each kill, `vmckpt recover` runs. Then every snapshot must be intact, the guest must run on
one host with intact memory and disk, and nothing may be left on the hosts. The answers that outside
clients received must be linearizable: a restore returns the guest to its snapshot, and a killed
restore may or may not have done so. See bench/snapshot_kills.py.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from vmckpt_lab import guests, host, lab, ledger
from vmckpt_lab.chaos.run import EVIDENCE
from vmckpt_lab.history.recorder import Recorder
from vmckpt_lab.plan import LabPlan

_PROGRAM = (sys.executable, "-m", "vmckpt.cli.app")
_WISHES: dict[str, Any] = {"memory": "192MiB", "dirty": "16MiB@1MiB/s", "disk": "32MiB"}
_LONGEST = 300.0


class Kills:
    """A campaign of kills with one guest and one store."""

    def __init__(self, plan: LabPlan, seed: int) -> None:
        self._plan, self._rng = plan, random.Random(seed)
        self._environment = {
            **os.environ,
            "VMCKPT_INVENTORY": str(plan.inventory),
            "VMCKPT_STATE": str(plan.folder / "kills"),
        }
        self._takes = {"create": 0.0, "restore": 0.0}
        self.killed: Counter[str] = Counter()
        self.ended_before = 0
        self.proved = 0
        self.histories = self.history_operations = self.histories_unknown = 0
        self._recorder: Recorder | None = None
        self.wrong: list[str] = []

    def begin(self) -> None:
        """Start the guest, take its first snapshots, and measure undisturbed commands."""
        self._run("snapshot", "init")  # fails if the store already exists
        guests.start(self._plan, "web1", "alpha", **_WISHES)
        for _ in range(2):
            began = time.monotonic()
            self._good("snapshot", "create", "web1")
            self._takes["create"] = time.monotonic() - began
        began = time.monotonic()
        self._good("snapshot", "restore", self._ids()[-1], "--replace")
        self._takes["restore"] = time.monotonic() - began

    def step(self) -> None:
        """Kill a process once, and check the result."""
        work = self._rng.choice(("create", "create", "restore"))
        victim = self._rng.choice(("controller", "agent"))
        before = self._ids()
        recorder = self._recording()
        began = time.monotonic()
        args = ("create", "web1") if work == "create" else ("restore", before[-1], "--replace")
        process = self._start("snapshot", *args)
        time.sleep(self._rng.uniform(0.1, 1.0) * self._takes[work])
        hit = process.poll() is None
        if victim == "controller" and hit:
            process.kill()
        elif hit:
            hit = self._kill_agents()
        _, said = process.communicate(timeout=_LONGEST)
        if hit:
            self.killed[f"{work}: {victim}"] += 1
        else:
            self.ended_before += 1
        ended = time.monotonic()
        if work == "restore":
            recorder.restored(before[-1], began, None if process.returncode else ended)
        after = f"{work} with its {victim} killed ({said.strip()[-160:]!r})"
        self._check(after, before)
        for made in set(self._ids()) - set(before):
            # The rest of a killed command may have taken the snapshot later.
            recorder.taken(made, began, time.monotonic() if process.returncode else ended)
        self._histories(recorder, after, ends=work == "restore")

    def _recording(self) -> Recorder:
        """Return the current recording, which ends with the next restore."""
        if self._recorder is None:
            self._recorder = Recorder(self._plan, "web1", clients=4)
            self._recorder.__enter__()
        return self._recorder

    def _histories(self, recorder: Recorder, after: str, *, ends: bool) -> None:
        """Check the clients' history since the last restore. `ends`: end the recording."""
        found = recorder.check(EVIDENCE)
        self.wrong += [f"after {after}: {one}" for one in found.wrong]
        self.histories += 1
        self.histories_unknown += bool(found.unknown)
        if ends or found.wrong:
            self.history_operations += found.answered
            self.close()

    def close(self) -> None:
        """Stop the clients."""
        if self._recorder is not None:
            self._recorder.__exit__()
        self._recorder = None

    def _kill_agents(self) -> bool:
        """Kill all agents, by their process IDs on each host. Returns whether any was killed."""
        found = False
        for one in self._plan.hosts:
            told = subprocess.run(
                host.enter(one, "pgrep", "-f", "vmckpt.agent.main"),
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            for number in told.stdout.split():
                killed = subprocess.run(host.enter(one, "kill", "-9", number), check=False)
                found |= killed.returncode == 0
        return found

    def _check(self, after: str, before: list[str]) -> None:
        recovered = self._run("recover", "--json")
        if recovered[0] != 0:
            self.wrong.append(f"after {after}: recover: {recovered[2].strip()[-300:]}")
        now = self._ids()
        if set(before) - set(now):
            self.wrong.append(f"after {after}: {sorted(set(before) - set(now))} are gone")
        code, _, said = self._run("snapshot", "verify", "--deep")
        if code:
            self.wrong.append(f"after {after}: verify: {said.strip()[-300:]}")
        self.proved += len(now)
        try:
            self._whole(after)
        except Exception as exc:  # noqa: BLE001  reported
            self.wrong.append(f"after {after}: {type(exc).__name__}: {exc}")
            self._again(now)

    def _whole(self, after: str) -> None:
        """Check that the guest runs on one host, with intact memory and disk."""
        entries = ledger.audit(self._plan, "web1").entries
        # The guest's output is not checked, because the restore has set the guest back in time.
        bad = [
            one.text for one in entries
            if one.name in ("memory", "disk") and "0 wrong" not in one.text
        ]  # fmt: skip
        if bad:
            self.wrong.append(f"after {after}: {bad}")
        roots = [one.root / "agent" for one in self._plan.hosts]
        files = [path for root in roots for path in root.rglob("*") if path.is_file()]
        left = [str(one) for one in files if not {"lines", "cache"} & set(one.parts)]
        if left:
            self.wrong.append(f"after {after}: left {left}")

    def _again(self, ids: list[str]) -> None:
        """Continue with the guest of the last snapshot, wherever the damaged guest is."""
        self.close()
        self._run("snapshot", "restore", ids[-1], "--replace")

    def end(self) -> None:
        """Check that the last snapshots can be restored."""
        self.close()
        for id_ in self._ids()[-4:]:
            code, _, said = self._run("snapshot", "restore", id_, "--replace")
            if code:
                self.wrong.append(f"at the end {id_} cannot be restored: {said.strip()[-300:]}")
            else:
                self._whole(f"the restore of {id_} at the end")

    def _ids(self) -> list[str]:
        return [one["id"] for one in json.loads(self._good("snapshot", "list", "--json"))]

    def _start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*_PROGRAM, *args], env=self._environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def _run(self, *args: str) -> tuple[int, str, str]:
        process = self._start(*args)
        out, err = process.communicate(timeout=_LONGEST)
        return process.returncode, out, err

    def _good(self, *args: str) -> str:
        code, out, err = self._run(*args)
        if code:
            raise RuntimeError(f"{' '.join(args)}: {err.strip()[-400:]}")
        return out


def run(name: str, kills: int, seed: int) -> dict[str, Any]:
    """Kill `kills` times in a running lab. Returns the results."""
    began = time.monotonic()
    plan = lab.load(name)
    campaign = Kills(plan, seed)
    try:
        campaign.begin()
        while campaign.killed.total() < kills and len(campaign.wrong) < 10:
            campaign.step()
            told = f"{campaign.killed.total()} kills, {len(campaign.wrong)} wrong"
            print(told, *campaign.wrong[-1:], file=sys.stderr, flush=True)
        campaign.end()
    finally:
        campaign.close()
        for guest in guests.stored(plan):
            guests.remove(plan, guest.name)
    folder = str(Path(plan.folder))
    return {
        "kills": campaign.killed.total(), "seconds": round(time.monotonic() - began, 1),
        "killed": dict(sorted(campaign.killed.items())), "ended_before": campaign.ended_before,
        "snapshots_proved": campaign.proved, "histories": campaign.histories,
        "history_operations": campaign.history_operations,
        "histories_unknown": campaign.histories_unknown,
        "wrong": [one.replace(folder, "") for one in campaign.wrong],
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), indent=2))
