"""Store the memory and disk of a guest with vmckpt, restic and borg, in turn on the same disk.

    sudo bench/all --only stores

The data is the captured memory of a lab guest, at two moments some seconds apart, and a disk of
real files, of which 1 % changes in between. Each program stores both snapshots and restores the
second; the restored files are compared with the originals. `bench/peers.py` explains how the
programs are used. A figure is the median of the turns; MB/s per core is the size of the data
divided by the CPU time of all threads.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import hands as lab_hands
from bench import limits, peers, snapshot_data, snapshot_inside
from bench.figure import Figure, Result, best, median
from bench.peers import MIB, PROGRAMS, Failed, Program, Ran
from vmckpt_lab import lab

SEED = 11
CHANGED = 0.01
"""Share of the disk's files that changes between the two snapshots."""
REGIONS = (256, 2048)
"""Sizes of the regions for which peak memory is measured, in MiB."""
_STEPS = {"first": "first snapshot", "second": "second snapshot", "restore": "restore"}


def captured(source: Path, mib: int) -> None:
    """Write a guest's memory and disk at two moments to `source`/1 and `source`/2."""
    name = f"bt{os.getpid()}"
    plan = lab.up(name)
    try:
        hands = lab_hands.Hands(plan, plan.folder / "identity")
        hands.guest("web1", memory=f"{mib}MiB", dirty=f"{mib * 5 // 8}MiB@20MiB/s", disk="64MiB",
                    shared_memory=True)  # fmt: skip
        disk = plan.shared / "web1.raw"
        hands.inside("images", "web1", "/dev/shm/bench-images", str(disk), str(source), "5")
        hands.gone("web1")
    finally:
        lab.down(name)
    first, second = (source / number / "disk-files" for number in ("1", "2"))
    filled = snapshot_data.fill(first, mib // 2 * MIB, SEED)
    shutil.copyfile(first, second)
    snapshot_data.change(second, filled, CHANGED, SEED)


def stored(turns: int, source: Path, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run the programs in turn, in the reverse order in every second turn."""
    found: dict[str, list[dict[str, Any]]] = {one.name: [] for one in PROGRAMS}
    for turn in range(turns):
        for program in PROGRAMS if turn % 2 == 0 else PROGRAMS[::-1]:
            home = Path(tempfile.mkdtemp(prefix="store-", dir=folder))
            try:
                found[program.name].append(_once(program(home), source, home))
            finally:
                shutil.rmtree(home)
            told = found[program.name][-1]
            print(program.name, *(f"{key} {told[key]['seconds']:.2f} s" for key in _STEPS),
                  flush=True)  # fmt: skip
    return found


def _once(program: Program, source: Path, home: Path) -> dict[str, Any]:
    # Both snapshots use the same path, because borg and restic identify a file by its path.
    place, back = home / "input", home / "restored"
    found: dict[str, Any] = {}
    back.mkdir()
    program.init()
    for number, what in (("1", "first"), ("2", "second")):
        shutil.rmtree(place, ignore_errors=True)
        _copy(source / number, place)
        found[what] = _figures(program.put(place))
    found["restore"] = _figures(program.get(back))
    found["bytes"] = peers.size(program.repository)
    for one in place.iterdir():
        if not snapshot_data.same(one, back / one.name):
            raise Failed(f"{program.name} restored {one.name} incorrectly")
    return found


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for one in source.iterdir():
        snapshot_data.copy(one, target / one.name)
    peers.fsync(target)


def _figures(ran: Ran) -> dict[str, Any]:
    return {"seconds": ran.seconds, "cpu": ran.cpu, "peak_mib": ran.peak}


def peak(folder: Path, mib: int) -> float:
    """Return vmckpt's highest memory use, in MiB, while it stores and reads `mib` MiB."""
    home = Path(tempfile.mkdtemp(prefix="memory-", dir=folder))
    feed = [sys.executable, "-m", "bench.snapshot_feed"]
    size = str(mib)
    try:
        runs = [
            peers.run([*feed, what, str(home / "s"), *more], lab_hands.ROOT, {}, None)
            for what, *more in (["init"], ["put-made", size, "mixed"], ["put-made", size, "mixed"],
                                ["get-made"])
        ]  # fmt: skip
    finally:
        shutil.rmtree(home)
    return max(ran.peak for ran in runs[1:])


def figures(
    turns: dict[str, list[dict[str, Any]]], size: float, told: dict[str, Any]
) -> tuple[Figure, ...]:
    """Return the figures; `size`: of the data, in bytes. Pure."""

    def of(step: str, key: str) -> dict[str, float | None]:
        return {name: median(one[step][key] for one in rows) for name, rows in turns.items()}

    rows = []
    for step, what in _STEPS.items():
        per_core = {name: size / 1e6 / (cpu or 1.0) for name, cpu in of(step, "cpu").items()}
        seconds = of(step, "seconds")
        ours, took = per_core.pop("vmckpt"), seconds.pop("vmckpt") or 0.0
        peer, peer_is = best(per_core, most=True)
        other, other_is = best(seconds)
        rows += [
            Figure(what=f"{what}, per core", unit="MB/s", ours=ours,
                   limit=told["sealing" if step == "first" else "memory_copy"] / 1e6,
                   limit_is="zstd and AES alone" if step == "first" else "copying memory",
                   peer=peer, peer_is=peer_is),
            Figure(what=what, unit="s", ours=took, limit=size / told["disk_write"],
                   limit_is="writing all data", peer=other, peer_is=other_is),
        ]  # fmt: skip
    sizes = {name: median(one["bytes"] / MIB for one in each) for name, each in turns.items()}
    ours_is = sizes.pop("vmckpt") or 0.0
    peer, peer_is = best(sizes)
    compared = told["compare"]
    return (
        *rows,
        Figure(what="size of both snapshots", unit="MiB", ours=ours_is, peer=peer, peer_is=peer_is),
        *(Figure(what=f"peak memory, {mib} MiB of data", unit="MiB", ours=value)
          for mib, value in told["peak_mib"].items()),
        Figure(what="comparing memory with its last copy", unit="GB/s",
               ours=compared["compare"]["gib_s"] * 1.073741824,
               limit=compared["read"]["gib_s"] * 1.073741824, limit_is="reading memory"),
    )  # fmt: skip


def measure(*, quick: bool) -> Result:
    """Capture the data, and run the programs in turn; `quick`: once, with little data."""
    versions = peers.versions()
    folder = Path(tempfile.mkdtemp(prefix="vmckpt-bench-", dir="/var/tmp"))
    try:
        source = folder / "source"
        for number in ("1", "2"):
            (source / number).mkdir(parents=True)
        captured(source, 256 if quick else 1024)
        size = sum(one.stat().st_blocks * 512 for one in (source / "1").iterdir())
        told = {
            "sealing": limits.sealing(source / "1"), "memory_copy": limits.memory_copy(),
            "disk_write": limits.disk_write(folder),
            "compare": snapshot_inside.compare(256, 3 if quick else 15),
            "peak_mib": {mib: peak(folder, mib) for mib in REGIONS[: 1 if quick else None]},
        }  # fmt: skip
        turns = stored(1 if quick else 3, source, folder)
    finally:
        shutil.rmtree(folder)
    raw = {"input_bytes": size, **told, "turns": turns}
    return Result(figures=figures(turns, size, told), versions=versions, raw=raw)
