"""Compare vmckpt migrate with `virsh migrate --live`, with the same flags and the same guest.

The programs move the guest in turn between two lab hosts. Compared are the total time and downtime
of the migration (from libvirt's final statistics), the blackout that clients see (from the
observer), and the elapsed time of the complete command. For vmckpt, the memory and CPU use during
a migration are also measured.

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
    """Return the command line of a migration with vmckpt."""
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
    """Return the command line of the same migration with virsh: same flags and stream address."""
    source = "beta" if to == "alpha" else "alpha"
    address = plan.host(to).address
    return [
        "virsh", "-c", f"qemu+tcp://{plan.host(source).address}/system", "migrate", "--live",
        "--p2p", "--persistent", "--undefinesource", "--unsafe", "--abort-on-error", "web1",
        f"qemu+tcp://{address}/system", "--migrateuri", f"tcp://{address}",
    ]  # fmt: skip


def measure(plan: LabPlan, command: list[str], to: str) -> Figures:
    """Run a migration with either program, and measure it from outside."""
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
    """Return total time and downtime in milliseconds, from libvirt's statistics on the target."""
    known = inventory.load(plan.inventory).host(host)
    async with Hypervisor(known) as target:
        guest = await find_guest(target, "web1")
        assert guest is not None
        totals = await LibvirtMigrationDriver(target, target, guest.uuid).totals()
    assert totals is not None
    assert totals.downtime is not None
    return totals.total * 1000, totals.downtime * 1000


def steady_cpu_share(plan: LabPlan, *, seconds: float = 8.0) -> float:
    """Return the share of a core that vmckpt uses during a long migration, without its start."""
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
    """Run each program once as a warm-up, then `runs` times in turn."""
    place, other = "alpha", {"alpha": "beta", "beta": "alpha"}
    programs = {"vmckpt": migrate_with_vmckpt, "virsh": migrate_with_virsh}
    found: dict[str, list[Figures]] = {name: [] for name in programs}
    for turn in range(runs + 1):
        # The order alternates, so that both programs benefit equally from warm caches.
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
    """Print and return the medians and their ratios."""
    rows = {}
    print(f"\n{'median of ' + str(len(found['virsh'])):<22}{'vmckpt':>10}{'virsh':>10}{'ratio':>8}")
    for key in found["virsh"][0]:
        ours, theirs = (statistics.median(f[key] for f in found[n]) for n in ("vmckpt", "virsh"))
        rows[key] = {"vmckpt": ours, "virsh": theirs, "ratio": ours / theirs if theirs else None}
        print(f"{key:<22}{ours:>10.1f}{theirs:>10.1f}{ours / theirs if theirs else 0:>8.2f}")
    return rows


def main() -> None:
    """Build a lab, measure, print the medians and remove the lab."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--runs", type=int, default=5)
    words.add_argument("--memory", default="512MiB")
    words.add_argument("--dirty", default="64MiB@20MiB/s")
    words.add_argument(
        "--link", default="1gbit", help="bandwidth of each host's link; 'off': no limit"
    )
    words.add_argument("--json", type=Path)
    asked = words.parse_args()
    name = f"bench-{os.getpid()}"
    plan = lab.up(name, shape=None if asked.link == "off" else parse_rate(asked.link))
    os.environ["VMCKPT_STATE"] = str(plan.folder / "state")  # removed with the lab
    try:
        guests.start(plan, "web1", "alpha", memory=asked.memory, dirty=asked.dirty)
        found = run(plan, asked.runs)
        share = steady_cpu_share(plan)
        whole = ledger.audit(plan, "web1").whole
    finally:
        lab.down(name)
    rows = table(found)
    print(f"CPU while a migration runs: {share:.1%} of one core; ledgers intact: {whole}")
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
