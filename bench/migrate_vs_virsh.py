"""vmckpt migrate beside `virsh migrate --live` with the same flags on the same guest.

Both move one guest back and forth between two lab hosts, in turn, in one run. Compared are the
migration's own total time and downtime (from libvirt's final statistics, for both), the
client-visible blackout (from the observer), and the whole command's wall-clock time. For vmckpt
also its memory and CPU use while the migration runs.

    sudo .venv/bin/python bench/migrate_vs_virsh.py [--runs 5] [--memory 512MiB]
        [--dirty 64MiB@20MiB/s] [--link 1gbit] [--json bench/results/migrate_vs_virsh.json]
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vmckpt import inventory
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.domains import find_guest
from vmckpt.hypervisor.migration import LibvirtMigrationDriver
from vmckpt.units import parse_rate
from vmckpt_lab import guests, lab, ledger
from vmckpt_lab.observer import client
from vmckpt_lab.plan import LabPlan

Figures = dict[str, float]


def migrate_with_vmckpt(plan: LabPlan, to: str) -> list[str]:
    """Our command."""
    program = str(Path(sys.executable).parent / "vmckpt")
    return [
        program,
        "migrate",
        "web1",
        "--to",
        to,
        "-i",
        str(plan.inventory),
        "--json",
        "--tls",
        "off",
    ]


def migrate_with_virsh(plan: LabPlan, to: str) -> list[str]:
    """The same migration by virsh: same flags, same address for the stream."""
    source = "beta" if to == "alpha" else "alpha"
    address = plan.host(to).address
    return [
        "virsh", "-c", f"qemu+tcp://{plan.host(source).address}/system", "migrate", "--live",
        "--p2p", "--persistent", "--undefinesource", "--unsafe", "--abort-on-error", "web1",
        f"qemu+tcp://{address}/system", "--migrateuri", f"tcp://{address}",
    ]  # fmt: skip


def measure(plan: LabPlan, command: list[str], to: str) -> Figures:
    """One migration by either program, measured the same way from outside."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    ended = time.monotonic()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} exited with {process.returncode}")
    time.sleep(0.3)
    total, downtime = asyncio.run(_totals(plan, to))
    seen = client.status(plan.observer_socket, "web1", since=began, until=ended + 0.2)
    quiet = client.status(plan.observer_socket, "web1", since=began - 1.0, until=began)
    return {
        "total_ms": total,
        "downtime_ms": downtime,
        "blackout_ms": seen.blackout * 1000,
        "undisturbed_gap_ms": quiet.blackout * 1000,
        "command_ms": (ended - began) * 1000,
        "memory_mib": usage.ru_maxrss / 1024,
        "cpu_s": usage.ru_utime + usage.ru_stime,
    }


async def _totals(plan: LabPlan, host: str) -> tuple[float, float]:
    """libvirt's final statistics on the target, the same source for both programs."""
    known = inventory.load(plan.inventory).host(host)
    async with Hypervisor(known) as target:
        guest = await find_guest(target, "web1")
        assert guest is not None
        totals = await LibvirtMigrationDriver(target, target, guest.uuid).totals()
    assert totals is not None
    assert totals.downtime is not None
    return totals.total * 1000, totals.downtime * 1000


def steady_cpu_share(plan: LabPlan, *, seconds: float = 8.0) -> float:
    """CPU of one core that vmckpt uses while a long migration runs, start-up not counted."""
    command = [*migrate_with_vmckpt(plan, "beta"), "--bandwidth", "8MiB/s"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
    )
    time.sleep(2.0)
    before = _cpu_of(process.pid)
    time.sleep(seconds)
    share = (_cpu_of(process.pid) - before) / seconds
    process.terminate()
    process.wait()
    return share


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(plan: LabPlan, runs: int) -> dict[str, list[Figures]]:
    """One warm-up each way, then `runs` of each program, in turn."""
    place, other = "alpha", {"alpha": "beta", "beta": "alpha"}
    programs = {"vmckpt": migrate_with_vmckpt, "virsh": migrate_with_virsh}
    found: dict[str, list[Figures]] = {name: [] for name in programs}
    for turn in range(runs + 1):
        # Whoever was first is second next time: what one leaves warm then helps both.
        for name in sorted(programs, reverse=turn % 2 == 0):
            place = other[place]
            time.sleep(1.5)
            figures = measure(plan, programs[name](plan, place), place)
            if turn > 0:
                found[name].append(figures)
                print(name, " ".join(f"{k}={v:.0f}" for k, v in figures.items()), flush=True)
    if place == "beta":
        measure(plan, migrate_with_virsh(plan, "alpha"), "alpha")
    return found


def table(found: dict[str, list[Figures]]) -> dict[str, Any]:
    """Medians and their ratio."""
    rows = {}
    print(f"\n{'median of ' + str(len(found['virsh'])):<22}{'vmckpt':>10}{'virsh':>10}{'ratio':>8}")
    for key in found["virsh"][0]:
        ours, theirs = (statistics.median(f[key] for f in found[n]) for n in ("vmckpt", "virsh"))
        rows[key] = {"vmckpt": ours, "virsh": theirs, "ratio": ours / theirs if theirs else None}
        print(f"{key:<22}{ours:>10.1f}{theirs:>10.1f}{ours / theirs if theirs else 0:>8.2f}")
    return rows


def main() -> None:
    """Build a lab, measure, print, and take the lab down."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--runs", type=int, default=5)
    words.add_argument("--memory", default="512MiB")
    words.add_argument("--dirty", default="64MiB@20MiB/s")
    words.add_argument(
        "--link", default="1gbit", help="each host's link; 'off': as fast as it goes"
    )
    words.add_argument("--json", type=Path)
    asked = words.parse_args()
    name = f"bench-{os.getpid()}"
    plan = lab.up(name, shape=None if asked.link == "off" else parse_rate(asked.link))
    os.environ["VMCKPT_STATE"] = str(plan.folder / "state")  # goes with the lab
    try:
        guests.start(plan, "web1", "alpha", memory=asked.memory, dirty=asked.dirty)
        found = run(plan, asked.runs)
        share = steady_cpu_share(plan)
        whole = ledger.audit(plan, "web1").whole
    finally:
        lab.down(name)
    rows = table(found)
    print(f"CPU while a migration runs: {share:.1%} of one core; ledgers whole: {whole}")
    if asked.json:
        result = {
            "guest": {"memory": asked.memory, "dirty": asked.dirty},
            "link": asked.link,
            "runs": found,
            "medians": rows,
            "cpu_share": share,
            "ledgers_whole": whole,
        }
        asked.json.write_text(json.dumps(result, indent=2) + "\n")
    if not whole:
        raise SystemExit("the ledgers do not agree")


if __name__ == "__main__":
    main()
