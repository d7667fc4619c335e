"""Back up a running guest's disks with vmckpt and virtnbdbackup, in turn.

    sudo bench/all --only disks

Each turn starts a new guest with a qcow2 disk of its own and one of real files. Both programs take
a full and an incremental backup of both disks. vmckpt compresses, encrypts and deduplicates;
virtnbdbackup does none of this, or compresses with lz4. CPU time is that of the complete machine,
without that of the idle guest, so that it includes the part of QEMU. All files are synced within
the measured time.
"""

import os
import shutil
import time
from pathlib import Path
from typing import Any

from bench import hands as lab_hands
from bench import limits, peers, snapshot_data
from bench.figure import Figure, Result, best, median
from bench.hands import HOST, Hands, versions
from bench.peers import MIB, PEERS, told
from bench.snapshots import GUEST, ran, silence, virsh
from vmckpt_lab import guests, host, lab
from vmckpt_lab.plan import LabPlan

_MODULES = {"PYTHONPATH": str(PEERS / "usr/lib/python3/dist-packages")}
_BACKUP = ("/usr/bin/python3", str(PEERS / "usr/bin/virtnbdbackup"))
_OURS, _LZ4 = "vmckpt", "virtnbdbackup -z"
PROGRAMS = (_OURS, "virtnbdbackup", _LZ4)
_TICKS = os.sysconf("SC_CLK_TCK")


def busy() -> float:
    """Return the CPU time that the machine has used so far, in seconds."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) / _TICKS


def guest(hands: Hands, files: Path) -> None:
    """Start an idle guest, and attach the disk of files."""
    hands.guest(GUEST, memory="256MiB", dirty="16MiB@0MiB/s", disk="64MiB", disk_format="qcow2")
    disk = hands.plan.shared / "files.qcow2"
    ran(["qemu-img", "convert", "-O", "qcow2", str(files), str(disk)])
    ran(virsh(hands.plan, "attach-disk", GUEST, str(disk), "vdb", "--subdriver", "qcow2",
              "--cache", "none", "--persistent"))  # fmt: skip


def new(plan: LabPlan) -> Hands:
    """Return the lab with an empty store, because the old store already has the data."""
    for folder in (plan.shared / "snapshots", plan.folder / "state"):
        shutil.rmtree(folder, ignore_errors=True)
    (plan.folder / "identity").unlink(missing_ok=True)
    return lab_hands.begin(plan)


def back_up(hands: Hands, program: str, level: str) -> None:
    """Take a backup of the level full or inc, and sync its files."""
    if program == _OURS:
        hands.vmckpt("snapshot", "create", GUEST, "--no-memory", "--json")
        return
    out = hands.plan.shared / "backup"
    more = ["-z"] if program == _LZ4 else []
    words = [*_BACKUP, "-d", GUEST, "-l", level, "-o", str(out), "-n", "--quiet", *more]
    path = f"PYTHONPATH={_MODULES['PYTHONPATH']}"
    ran(host.enter(hands.plan.host(HOST), "env", path, *words))
    peers.fsync(out)


def once(hands: Hands, program: str, files: Path) -> dict[str, Any]:
    """Measure a full and an incremental backup of a new guest."""
    guest(hands, files)
    try:
        before, began = busy(), time.monotonic()
        time.sleep(3.0)
        idle = (busy() - before) / (time.monotonic() - began)
        found = {}
        for what, level in (("first", "full"), ("second", "inc")):
            before, began = busy(), time.monotonic()
            back_up(hands, program, level)
            took = time.monotonic() - began
            found[what] = {"seconds": took, "cpu": max(0.01, busy() - before - idle * took),
                           "silent_ms": silence(hands.plan, began)}  # fmt: skip
            time.sleep(1.0)
        return found
    finally:
        guests.remove(hands.plan, GUEST)
        shutil.rmtree(hands.plan.shared / "backup", ignore_errors=True)
        (hands.plan.shared / "files.qcow2").unlink(missing_ok=True)


def figures(turns: dict[str, list[dict[str, Any]]], size: int, disk: float) -> tuple[Figure, ...]:
    """Return the figures; `size` in bytes, `disk`: its bandwidth in bytes per second. Pure."""

    def row(what: str, unit: str, step: str, key: str, **limit: Any) -> Figure:
        values = {
            name: median(
                size / 1e6 / one[step]["cpu"] if unit == "MB/s" else one[step][key] for one in each
            )
            for name, each in turns.items()
        }
        ours = values.pop(_OURS) or 0.0
        peer, peer_is = best(values, most=unit == "MB/s")
        return Figure(what=what, unit=unit, ours=ours, peer=peer, peer_is=peer_is, **limit)

    full = {"limit_is": "reading the data from the disk", "limit": size / disk}
    return (
        row("full backup of the disks", "s", "first", "seconds", **full),
        row("full backup, per core", "MB/s", "first", "cpu"),
        row("its longest silence outside", "ms", "first", "silent_ms"),
        row("incremental backup, nothing written", "s", "second", "seconds"),
        row("its longest silence outside", "ms", "second", "silent_ms"),
    )


def measure(*, quick: bool) -> Result:
    """Back up guests in turn; `quick`: once, with a small disk."""
    version = told([*_BACKUP, "--version"], _MODULES)
    name = f"bv{os.getpid()}"
    plan = lab.up(name)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in PROGRAMS}
    try:
        files = plan.shared / "files.raw"
        snapshot_data.fill(files, (64 if quick else 1024) * MIB, 7)
        size = files.stat().st_blocks * 512
        disk = limits.disk_write(plan.shared)
        small = plan.shared / "small.raw"
        small.write_bytes(bytes(MIB))
        once(new(plan), _OURS, small)  # installs the agent
        for turn in range(1 if quick else 3):
            for program in PROGRAMS if turn % 2 == 0 else PROGRAMS[::-1]:
                turns[program].append(once(new(plan), program, files))
                print(program, turns[program][-1], flush=True)
    finally:
        lab.down(name)
    raw = {"input_bytes": size, "disk_write": disk, "turns": turns}
    return Result(
        figures=figures(turns, size, disk),
        versions={"virtnbdbackup": version, **versions()}, raw=raw,
    )  # fmt: skip
