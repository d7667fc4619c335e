"""Measure snapshots of running guests, and compare snapshots with restic and borg, in one run.

    sudo .venv/bin/python -m bench.snapshot [--turns 5] [--folder DIR] [--disk-mib 256]
        [--only live,memory,peers,compare] [--json bench/results/snapshot.json]

* live: in a lab, the pauses, the guest's work during a snapshot, second snapshots, and restores;
  second snapshots by write tracking of guests of 256 MiB and 4 GiB
  (snapshot_live.py)
* peers: vmckpt, restic and borg in turn store the captured data and a disk of real files
  (snapshot_peers.py): a first snapshot, a snapshot of a few seconds later, and the restore of the
  second one
* compare: the comparison of memory in a capture, relative to plain reading (snapshot_inside.py)
* memory: vmckpt's peak memory for regions of several sizes (snapshot_feed.py).

restic and borg must be installed. A figure is the median of the turns. `cpu` is the CPU time of all
threads, which is more reliable than the elapsed time if the machine is busy.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import (
    snapshot_data,
    snapshot_feed,
    snapshot_figures,
    snapshot_inside,
    snapshot_live,
    snapshot_peers,
)
from bench.snapshot_peers import MIB, PROGRAMS, Failed, Program, Ran
from vmckpt.errors import LabError
from vmckpt_lab import lab

SEED = 11
CHANGED = 0.01
"""Share of the disk's files that changes between the two snapshots."""
SIZES = (256, 1024, 4096)
"""Sizes of the regions for which peak memory is measured, in MiB."""
PHASES = ("live", "memory", "peers", "compare")
"""The phase that itself needs much memory is last: a child's peak is at least its parent's use."""


def live(turns: int, source: Path) -> dict[str, Any]:
    """Run the phases that need a lab. Writes the captured files to `source`/1 and `source`/2."""
    name = f"bs{os.getpid()}"
    plan = lab.up(name)
    try:
        hands = snapshot_live.begin(plan)
        steps: dict[str, Callable[[], dict[str, Any]]] = {
            "shared": lambda: snapshot_live.shared(hands, turns, source),
            "tracked": lambda: snapshot_live.tracked(hands, turns),
            "idle": lambda: snapshot_live.idle(hands, turns),
            "busy": lambda: snapshot_live.busy(hands, turns),
        }
        return {what: _tried(what, steps[what]) for what in steps}
    finally:
        lab.down(name)


def _tried(what: str, step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a step. If it fails, for example on a busy machine, the other steps still run."""
    began = time.monotonic()
    try:
        found = step()
    except (LabError, Failed) as exc:
        found = {"failed": str(exc)}
    print(f"{what}: {found.get('failed', 'done')}, {time.monotonic() - began:.0f} s", flush=True)
    return found


def disks(source: Path, mib: int) -> None:
    """Create a disk of real files, and a copy in which some blocks are changed."""
    first, second = (source / number / "disk-files" for number in ("1", "2"))
    filled = snapshot_data.fill(first, mib * MIB, SEED)
    shutil.copyfile(first, second)
    snapshot_data.change(second, filled, CHANGED, SEED)


def peers(turns: int, source: Path, folder: Path) -> dict[str, Any]:
    """Run the programs in turn, in the reverse order in every second turn."""
    found: dict[str, list[dict[str, Any]]] = {one.name: [] for one in PROGRAMS}
    for turn in range(turns):
        for program in PROGRAMS if turn % 2 == 0 else PROGRAMS[::-1]:
            home = Path(tempfile.mkdtemp(prefix=f"{program.name}-", dir=folder))
            try:
                found[program.name].append(_once(program(home), source, home))
            finally:
                shutil.rmtree(home)
            told = found[program.name][-1]
            print(
                program.name,
                *(f"{key} {told[key]['seconds']:.2f} s" for key in ("first", "second", "restore")),
                flush=True,
            )
    mib = sum(one.stat().st_blocks * 512 for one in (source / "1").iterdir()) / MIB
    versions = {one.name: one.version() for one in PROGRAMS}
    return {"input_mib": mib, "versions": versions, "turns": found}


def _once(program: Program, source: Path, home: Path) -> dict[str, Any]:
    # Both snapshots use the same path, because borg and restic identify a file by its path.
    place, back = home / "input", home / "restored"
    found: dict[str, Any] = {}
    back.mkdir()
    program.init()
    for number, what in (("1", "first"), ("2", "second")):
        shutil.rmtree(place, ignore_errors=True)
        _copy(source / number, place)
        before = snapshot_peers.size(program.repository)
        found[what] = _figures(program.put(place))
        found[what]["bytes"] = snapshot_peers.size(program.repository) - before
    found["restore"] = _figures(program.get(back))
    found["bytes"] = found["first"]["bytes"] + found["second"]["bytes"]
    for one in place.iterdir():
        if not snapshot_data.same(one, back / one.name):
            raise Failed(f"{program.name} restored {one.name} incorrectly")
    return found


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for one in source.iterdir():
        snapshot_data.copy(one, target / one.name)
    snapshot_peers.fsync(target)


def _figures(ran: Ran) -> dict[str, Any]:
    return {"seconds": ran.seconds, "cpu": ran.cpu, "peak_mib": ran.peak}


def memory(folder: Path) -> list[dict[str, Any]]:
    """Measure vmckpt's peak memory for a first snapshot, a second snapshot and a restore."""
    found = []
    for mib in SIZES:
        for kind in snapshot_feed.KINDS:
            home = Path(tempfile.mkdtemp(prefix="memory-", dir=folder))
            try:
                row: dict[str, Any] = {"mib": mib, "kind": kind}
                for what, words in {
                    "init": ["init"],
                    "first": ["put-made", str(mib), kind],
                    "second": ["put-made", str(mib), kind],
                    "restore": ["get-made"],
                }.items():
                    feed = [sys.executable, "-m", "bench.snapshot_feed", words[0]]
                    ran = snapshot_peers.run(
                        [*feed, str(home / "s"), *words[1:]], snapshot_live.ROOT, {}, None
                    )
                    row[what] = ran.peak
                found.append(row)
                print(f"{mib} MiB {kind}: {row['first']:.0f} {row['second']:.0f}", flush=True)
            finally:
                shutil.rmtree(home)
    return found


def main() -> None:
    """Run the requested phases, print the figures and save them."""
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--turns", type=int, default=5)
    words.add_argument("--folder", type=Path, help="directory on the disk to write to")
    words.add_argument("--disk-mib", type=int, default=256)
    words.add_argument("--only", default=",".join(PHASES), help="some of " + ", ".join(PHASES))
    words.add_argument("--json", type=Path)
    asked = words.parse_args()
    only = asked.only.split(",")
    if set(only) - set(PHASES):
        raise SystemExit(f"invalid --only {asked.only}: use some of {','.join(PHASES)}")
    if "peers" in only and "live" not in only:
        raise SystemExit("peers needs the data that live captures: use --only live,peers")
    try:
        versions = [one.version() for one in PROGRAMS] if "peers" in only else []
    except Failed as exc:
        raise SystemExit(str(exc)) from None
    print("load", os.getloadavg(), *versions, flush=True)
    folder = Path(tempfile.mkdtemp(prefix="vmckpt-bench-", dir=asked.folder or "/var/tmp"))
    try:
        result = _run(asked, only, folder)
    finally:
        shutil.rmtree(folder)
    rows = snapshot_figures.rows(result)
    result["figures"] = rows
    for row in rows:
        print(
            f"{row['what']:<72}{row['is']:>9.2f}  goal {row['wanted']:<9}"
            f" {'yes' if row['kept'] else 'NO'}"
        )
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


def _run(asked: argparse.Namespace, only: Sequence[str], folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {"load": {"before": os.getloadavg()}, "turns": asked.turns}
    source = folder / "source"
    for number in ("1", "2"):
        (source / number).mkdir(parents=True)
    steps: dict[str, Callable[[], Any]] = {
        "live": lambda: live(asked.turns, source),
        "memory": lambda: memory(folder),
        "peers": lambda: peers(asked.turns, source, folder),
        "compare": lambda: snapshot_inside.compare(256, 4 * asked.turns),
    }
    for name in PHASES:
        if name in only:
            if name == "peers":
                disks(source, asked.disk_mib)
            print(f"-- {name}", flush=True)
            result[name] = steps[name]()
            result["load"][name] = os.getloadavg()
    return result


if __name__ == "__main__":
    main()
