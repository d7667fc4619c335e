"""A campaign of kill -9: kill commands that use a store, at fault points and at random moments.

    .venv/bin/python -m bench.snapshot_kills [--kills 200] [--seed 1] [--json FILE]
        [--lab NAME --lab-kills 20]

Half of the kills are at a fault point (vmckpt/store/fault_injection.py), half at a random moment.
Sometimes a second command uses the store at the same time. After each kill, every published
snapshot must pass a deep verification and restore the same bytes, no snapshot may be missing unless
it was deleted, and garbage collections of a copy of the store must leave no unneeded object. The
killed operations are in bench/kill_works.py, and use small random guests. With --lab, more kills
follow in that lab, with a real guest (bench/lab_kills.py).
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import kill_works as works
from vmckpt.snapshot import catalog
from vmckpt.snapshot.verify import verify
from vmckpt.snapshot.verify.verify import Depth
from vmckpt.store import gc
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.gc_plan import use_of
from vmckpt.store.repository import Store
from vmckpt.units import Seconds

STORES = ("near", "far")
_CHOICES = {
    "create": 8, "delete": 2, "prune": 2, "collect": 5, "copy": 4, "carry": 1, "restore": 1,
    "repair": 2,
}  # fmt: skip
_ENOUGH = 14
"""Number of snapshots per store above which more snapshots are deleted than created."""


class Forker:
    """Runs each operation in its own process."""

    def __init__(self, said: Path) -> None:
        """`said`: a file for the output of the operations."""
        self._said = said
        with said.open("ab") as file:
            self._program = subprocess.Popen(
                [sys.executable, "-m", "bench.kill_works"],
                text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
            )  # fmt: skip

    def start(self, work: str, *args: Any, fault: str = "", record: str = "") -> int:
        """Start an operation. Returns its process ID."""
        asked = {"work": work, "args": [str(args[0]), *args[1:]], "fault": fault, "record": record}
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(json.dumps(asked) + "\n")
        self._program.stdin.flush()
        return int(self._program.stdout.readline())

    def end(self) -> tuple[int, str]:
        """Wait for the operation. Returns its exit status and its output."""
        assert self._program.stdout is not None
        status = int(self._program.stdout.readline())
        said = self._said.read_text()
        os.truncate(self._said, 0)
        return status, said

    def close(self) -> None:
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._program.wait(10)


@dataclass(slots=True)
class Tally:
    """The totals of a campaign, and the violations."""

    kills: int = 0
    at: Counter[str] = field(default_factory=Counter)
    """Number of kills at each fault point, or at "any moment"."""
    of: Counter[str] = field(default_factory=Counter)
    beside: int = 0
    not_killed: int = 0
    """Number of operations that ended before they were killed."""
    proved: int = 0
    """Number of deep verifications and restores of a snapshot that succeeded, in all checks."""
    wrong: list[str] = field(default_factory=list)

    def as_json(self, seed: int, seconds: float) -> dict[str, Any]:
        return {
            "seed": seed, "kills": self.kills, "seconds": round(seconds, 1),
            "killed": dict(sorted(self.of.items())), "at": dict(sorted(self.at.items())),
            "with_others_at_work": self.beside, "ended_before": self.not_killed,
            "snapshots_proved": self.proved, "wrong": self.wrong,
        }  # fmt: skip


class Campaign:
    """Kills operations, and checks the stores after each kill."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.tally = Tally()
        self._folder, self._rng = folder, random.Random(seed)
        self._first, self._second = Forker(folder / "said"), Forker(folder / "said too")
        self._versions = dict.fromkeys(works.GUESTS, 0)
        self._points: dict[str, list[str]] = {}
        self._takes: dict[str, float] = {}
        self._there: dict[str, set[str]] = {name: set() for name in STORES}
        for name in STORES:
            Store.create(LocalFolder(folder / name))

    def close(self) -> None:
        self._first.close()
        self._second.close()

    def learn(self) -> None:
        """Record which fault points each operation passes, and how long it takes undisturbed."""
        record = str(self._folder / "passed")
        order = ("create", "create", "create", "copy", "carry", "restore", "delete")
        for work in (*order, "collect", "collect", "create", "prune", "collect", "repair"):
            args = ["near", 0.0] if work == "collect" else self._args(work)
            began = time.monotonic()
            self._first.start(work, self._folder, *args, record=record)
            status, said = self._first.end()
            assert status == 0, said
            self._takes[work] = time.monotonic() - began
            passed = _moments(json.loads(Path(record).read_text()))
            known = self._points.setdefault(work, [])
            known += [one for one in passed if one not in known]
            self._check(work)

    def step(self) -> None:
        """Kill an operation, and check the stores."""
        work = self._choice()
        args = self._args(work)
        if work == "repair":
            self._all_far()
            works.damage(self._folder, args[0], self._rng.randrange(1 << 30))
        beside = self._beside(work)
        at_point = self._rng.random() < 0.5 and bool(self._points[work])
        fault = self._rng.choice(self._points[work]) if at_point else ""
        child = self._first.start(work, self._folder, *args, fault=fault)
        if not at_point:
            time.sleep(self._rng.uniform(0.0, 1.1) * self._takes[work])
            _kill(child)
        status, said = self._first.end()
        if beside:
            other, also = self._second.end()
            self.tally.beside += 1
            if other and not _refused(also):
                self._wrong(f"{beside} beside {work}: {also.strip()[-400:]}")
        killed = status == -signal.SIGKILL
        if killed:
            self.tally.kills += 1
            self.tally.of[work] += 1
            self.tally.at[fault.partition("#")[0] or "any moment"] += 1
        else:
            self.tally.not_killed += 1
        if not killed and status and not _refused(said):
            self._wrong(f"{work} {args}: {said.strip()[-400:]}")
        if work == "repair" and (killed or status):
            self._first.start("repair", self._folder, *args)
            _, said = self._first.end()
            # The lock of the killed command would expire after a quarter of an hour.
            if "is already running a garbage collection" in said:
                (self._folder / args[0] / "locks" / "gc").unlink()
                self._first.start("repair", self._folder, *args)
                self._first.end()
        self._check(f"{work} {args} killed at {fault or 'any moment'}, beside {beside or 'nobody'}")

    def _choice(self) -> str:
        full = min(len(one) for one in self._there.values()) > _ENOUGH
        choices = dict(_CHOICES)
        if full or len(self._there["near"]) > 2 * _ENOUGH:
            choices |= {"create": 1, "copy": 1, "delete": 8, "prune": 6}
        return self._rng.choices(list(choices), list(choices.values()))[0]

    def _all_far(self) -> None:
        """Copy all snapshots to the far store, so that it can repair the near store."""
        for id_ in sorted(self._there["near"] - self._there["far"]):
            self._first.start("copy", self._folder, "near", "far", id_)
            status, said = self._first.end()
            if status:
                self._wrong(f"copy of {id_} before a repair: {said.strip()[-400:]}")
        self._there["far"] |= self._there["near"]

    def _args(self, work: str) -> list[Any]:
        rng = self._rng
        name = rng.choice(STORES)
        if work == "create":
            guest = rng.choice(works.GUESTS)
            self._versions[guest] += 1
            return [guest, self._versions[guest]]
        if work in ("copy", "carry"):
            from_, to = ("near", "far") if rng.random() < 0.8 or not self._there["far"] else (
                "far", "near")  # fmt: skip
            return [from_, to, rng.choice(sorted(self._there[from_]))]
        if work == "repair":
            return ["near", "far"]
        if work == "collect":
            return [name, rng.choice((0.0, 900.0))]
        if work == "prune":
            return [name, rng.randrange(1, 4)]
        if not self._there[name]:
            name = "near"
        return [name, rng.choice(sorted(self._there[name]))]

    def _beside(self, work: str) -> str:
        """Sometimes start a second command. Returns its name, or an empty string."""
        if work == "repair" or self._rng.random() > 0.35:
            return ""
        other = self._rng.choice(["create", "collect", "copy", "delete"])
        args = self._args(other)
        if other == "collect":
            # A collection that considers live processes dead may do anything.
            args[1] = 900.0
        if work == "collect":
            other, args = "restore", self._args("restore")
        self._second.start(other, self._folder, *args)
        return other

    def _check(self, after: str) -> None:
        for name in STORES:
            store = works.opened(self._folder, name)
            now = {one.id for one in store.manifests()}
            gone = self._there[name] - now
            if gone and not any(word in after for word in ("delete", "prune")):
                self._wrong(f"{name}: after {after} {sorted(gone)} are gone")
            self._there[name] = now
            self._prove(store, after)
            copied = self._folder / "looked at"
            shutil.copytree(self._folder / name, copied)
            try:
                self._clean(Store.open(LocalFolder(copied)), after)
            finally:
                shutil.rmtree(copied)

    def _prove(self, store: Store, after: str) -> None:
        ids = [one.id for one in store.manifests()]
        found = verify.prove(
            store, (), Depth.DEEP, trusted={works.SIGNING.public}, identity=lambda: works.ADMIN
        )
        for flaw in found.flaws:
            self._wrong(f"{store.backend.where}: after {after}: {flaw}")
        for id_ in ids:
            try:
                works.restored(store, id_)
            except Exception as exc:  # noqa: BLE001  reported
                self._wrong(f"{store.backend.where}: after {after}: {exc}")
            else:
                self.tally.proved += 1

    def _clean(self, store: Store, after: str) -> None:
        for _ in range(4):
            gc.collect(store, catalog.references, grace=Seconds(0.0), life=Seconds(0.0))
        backend = store.backend
        left = [one.key for kind in ("locks/", "condemned/") for one in backend.keys(kind)]
        left += [one.key for one in backend.leftovers()]
        there = {one.id for one in store.manifests()}
        for kind in ("wraps/", "pins/"):
            left += [one.key for one in backend.keys(kind) if one.key[len(kind) :] not in there]
        listing = store.catalog.load()
        use = use_of(
            listing.index, frozenset(), gc.live_names(store, catalog.references)
        )  # fmt: skip
        left += sorted(set(listing.stored) - set(use.needed))
        if left:
            self._wrong(f"after {after} and collections, these objects remain: {left}")
        self._prove(store, f"{after} and collections")

    def _wrong(self, what: str) -> None:
        what = what.replace(str(self._folder), "")
        self.tally.wrong.append(what)
        print(f"WRONG: {what}", file=sys.stderr)


def _moments(points: list[str]) -> list[str]:
    """Number the passes of each fault point: POINT#0, POINT#1, …"""
    times: Counter[str] = Counter()
    told = []
    for point in points:
        told.append(f"{point}#{times[point]}")
        times[point] += 1
    return told


def _kill(child: int) -> None:
    try:
        os.kill(child, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _refused(said: str) -> bool:
    """Return whether a command failed with an expected error, because of another command."""
    words = (
        "NotInStore", "is already running a garbage collection", "has no snapshot",
        "did not refresh the lock",
    )  # fmt: skip
    return any(word in said for word in words)


def main() -> None:
    """Run the campaign, print the totals and save them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lab", help="name of a running lab")
    parser.add_argument("--lab-kills", type=int, default=20)
    asked = parser.parse_args()
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=place, prefix="vmckpt-kills-") as folder:
        campaign = Campaign(Path(folder), asked.seed)
        try:
            campaign.learn()
            while campaign.tally.kills < asked.kills and len(campaign.tally.wrong) < 20:
                campaign.step()
                if sys.stderr.isatty():
                    print(f"\r{campaign.tally.kills} kills", end="", file=sys.stderr)
        finally:
            campaign.close()
    told = campaign.tally.as_json(asked.seed, time.monotonic() - began)
    if asked.lab:
        from bench import lab_kills  # noqa: PLC0415

        told["lab"] = lab_kills.run(asked.lab, asked.lab_kills, asked.seed)
    print(json.dumps(told, indent=2))
    if asked.json:
        asked.json.write_text(json.dumps(told, indent=2) + "\n")
    sys.exit(1 if told["wrong"] or told.get("lab", {}).get("wrong") else 0)


if __name__ == "__main__":
    main()
