"""Snapshots and restores of running guests by the size of their memory, next to virsh.

    sudo bench/all --only snapshots

Each guest has filled three quarters of its memory, and rewrites it at 20 MiB/s. vmckpt stores
encrypted, compressed snapshots; virsh writes memory to a file (`snapshot-create-as --live`), and
restores a guest from the file of `virsh save`. A silence is the longest interval without an answer
of the guest, as seen from outside, minus the usual one. A restore ends with the guest's first
answer.
"""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import hands as lab_hands
from bench import limits
from bench.figure import Figure, Result, median
from bench.hands import HOST, Hands, versions
from bench.peers import Failed
from vmckpt_lab import guests, host, lab
from vmckpt_lab.observer import client
from vmckpt_lab.pace import PROBE_INTERVAL
from vmckpt_lab.plan import LabPlan

SIZES = (256, 1024, 4096, 8192)
"""Memory of the guests, in MiB."""
RESTORED = SIZES[:3]
GUEST = "web1"
_MEMORY = "/var/tmp/bench.memory"
_WITHIN = 120.0


def silence(plan: LabPlan, began: float) -> float:
    """Return the longest silence since `began`, in milliseconds, without the usual interval."""
    seen = client.status(plan.observer_socket, GUEST, since=began, until=time.monotonic())
    return 1000 * max(0.0, seen.blackout - PROBE_INTERVAL)


def virsh(plan: LabPlan, *words: str) -> list[str]:
    """Return a command of virsh on the guest's host."""
    return ["virsh", "-c", f"qemu+tcp://{plan.host(HOST).address}/system", *words]


def ran(words: Sequence[str]) -> None:
    """Run a command. Raises Failed."""
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"{' '.join(words)}: {done.stderr[-500:]}")


def created(hands: Hands) -> dict[str, Any]:
    """Take a snapshot with vmckpt."""
    began = time.monotonic()
    told = hands.vmckpt("snapshot", "create", GUEST, "--json")
    took, silent = time.monotonic() - began, silence(hands.plan, began)
    time.sleep(1.0)
    return {
        "id": told["id"], "way": told["way"], "command_s": took, "took_s": told["took_ms"] / 1000,
        "pause_ms": told["pause_ms"], "silent_ms": silent, "read": told["read_bytes"],
        "written": told["written_bytes"],
    }  # fmt: skip


def by_virsh(plan: LabPlan) -> dict[str, float]:
    """Write the guest's memory to a file with virsh, while the guest runs."""
    words = ("snapshot-create-as", GUEST, "bench", "--live", "--no-metadata", "--memspec",
             f"file={_MEMORY},snapshot=external", "--diskspec", "vda,snapshot=no")  # fmt: skip
    began = time.monotonic()
    ran(virsh(plan, *words))
    took = time.monotonic() - began
    silent = silence(plan, began)
    _remove(plan)
    return {"took_s": took, "silent_ms": silent}


def _remove(plan: LabPlan) -> None:
    ran(host.enter(plan.host(HOST), "rm", "-f", _MEMORY))


def answered(plan: LabPlan, words: Sequence[str], more: dict[str, str]) -> float:
    """Run a command that starts the guest. Returns the time until its first answer, in seconds."""
    began = time.monotonic()
    command = subprocess.Popen(
        words, env={**os.environ, **more}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    heard = 0.0
    while heard <= began:
        time.sleep(0.005)
        heard = client.status(plan.observer_socket, GUEST).answered_at or 0.0
        failed = command.poll() not in (None, 0)
        if failed or time.monotonic() > began + _WITHIN:
            command.kill()
            raise Failed(f"{' '.join(words)}: {command.communicate()[1][-500:]!r}")
    command.communicate()
    return heard - began


def restored(hands: Hands, snapshot: str, turns: int) -> dict[str, list[float]]:
    """Restore the guest in turn from a snapshot of vmckpt and from a file of virsh."""
    plan = hands.plan
    found: dict[str, list[float]] = {"vmckpt": [], "virsh": []}
    words = ("snapshot", "restore", snapshot, "--replace", "--identity", str(hands.keys))
    for _ in range(turns):
        ran(virsh(plan, "save", GUEST, _MEMORY))
        time.sleep(1.0)
        found["virsh"].append(answered(plan, virsh(plan, "restore", _MEMORY), {}))
        _remove(plan)
        time.sleep(2.0)
        ran(virsh(plan, "destroy", GUEST))
        time.sleep(1.0)
        found["vmckpt"].append(answered(plan, hands.command(*words), hands.environment))
        time.sleep(2.0)
    return found


def sized(hands: Hands, mib: int, *, quick: bool) -> dict[str, Any]:
    """Measure a guest of one size."""
    plan, turns = hands.plan, 1 if quick else 2
    hands.guest(
        GUEST, memory=f"{mib}MiB", dirty=f"{min(3 * mib // 4, mib - 96)}MiB@20MiB/s", disk="64MiB"
    )
    try:
        found: dict[str, Any] = {"still_ms": hands.inside("still", GUEST, "20")["ms"]}
        found["first"] = created(hands)
        found["later"], found["virsh"] = [], []
        for _ in range(turns):
            found["later"].append(created(hands))
            found["virsh"].append(by_virsh(plan))
            time.sleep(1.0)
        if mib in RESTORED:
            found["restores"] = restored(hands, found["later"][-1]["id"], turns)
        return found
    finally:
        guests.remove(plan, GUEST)  # no audit: the restores set the guest back in time


def figures(told: dict[int, dict[str, Any]], copy: float) -> list[Figure]:
    """Return the figures of all sizes; `copy`: bandwidth of memory in bytes per second. Pure."""
    rows: list[Figure] = []
    for mib, found in told.items():
        name, first, later, virsh_ = _name(mib), found["first"], found["later"], found["virsh"]
        pause: dict[str, Any] = {"limit": found["still_ms"], "limit_is": "stop and cont"}
        peer: dict[str, Any] = {"peer_is": "virsh --live, memory only"}
        again = _middle(later, "took_s")
        rows += [
            Figure(what=f"{name}: first snapshot", unit="s", ours=first["took_s"],
                   limit=first["read"] / copy, limit_is="copying memory",
                   peer=_middle(virsh_, "took_s"), **peer),
            Figure(what=f"{name}: its pause", unit="ms", ours=first["pause_ms"], **pause),
            Figure(what=f"{name}: later snapshot", unit="s", ours=again,
                   limit=_middle(later, "read") / copy, limit_is="copying the written pages",
                   peer=_middle(virsh_, "took_s"), **peer),
            Figure(what=f"{name}: its pause", unit="ms", ours=_middle(later, "pause_ms"), **pause),
            Figure(what=f"{name}: its silence outside", unit="ms",
                   ours=_middle(later, "silent_ms"), peer=_middle(virsh_, "silent_ms"), **peer),
        ]  # fmt: skip
    return rows


def restores(told: dict[int, dict[str, Any]], copy: float) -> list[Figure]:
    """Return the figures of the restores. Pure."""
    return [
        Figure(what=f"{_name(mib)}: restore until the first answer", unit="s",
               ours=median(found["restores"]["vmckpt"]) or 0.0, limit=found["first"]["read"] / copy,
               limit_is="copying memory", peer=median(found["restores"]["virsh"]),
               peer_is="virsh restore")
        for mib, found in told.items() if "restores" in found
    ]  # fmt: skip


def _name(mib: int) -> str:
    return f"{mib} MiB" if mib < 1024 else f"{mib // 1024} GiB"


def _middle(rows: Sequence[dict[str, Any]], key: str) -> float:
    return median(row[key] for row in rows) or 0.0


def measure(*, quick: bool) -> Result:
    """Measure guests of all sizes in a lab; `quick`: only the smallest."""
    name = f"bs{os.getpid()}"
    plan = lab.up(name)
    told: dict[int, dict[str, Any]] = {}
    try:
        hands = lab_hands.begin(plan)
        hands.guest("warm", memory="128MiB", dirty="8MiB@0MiB/s", disk="16MiB")
        hands.vmckpt("snapshot", "create", "warm")  # installs the agent
        guests.remove(plan, "warm")
        for mib in SIZES[:1] if quick else SIZES:
            began = time.monotonic()
            told[mib] = sized(hands, mib, quick=quick)
            print(f"{mib} MiB: {time.monotonic() - began:.0f} s", flush=True)
        disk = limits.disk_write(Path(plan.shared))
    finally:
        lab.down(name)
    copy = limits.memory_copy()
    raw = {"sizes": told, "memory_copy": copy, "disk_write": disk}
    rows = (*figures(told, copy), *restores(told, copy))
    return Result(figures=rows, versions=versions(), raw=raw)
