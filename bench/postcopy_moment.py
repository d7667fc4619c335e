"""Compare moments of the switch to post-copy, for a guest that rewrites most of its memory.

Three programs move the same guest in turn between two lab hosts:

    postcopy    vmckpt migrate --mode postcopy
    hybrid      vmckpt migrate --policy must-finish
    virsh       virsh migrate --live --postcopy, switched as soon as memory is sent

All are measured from outside in the same way: the time from the first byte until the source has
released the guest, and the guest's lost work. Lost work is the time that the guest would have
needed, at its speed before the migration, for the writes that it did not make during the migration
and the seconds after it.

    sudo .venv/bin/python -m bench.postcopy_moment [--runs 5] [--memory 256MiB]
        [--dirty 150MiB@100MiB/s] [--link 200mbit] [--json bench/results/postcopy_moment.json]
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

from bench.convergence import OTHER, Run, Stopwatch
from vmckpt import inventory
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.domains import find_guest
from vmckpt.hypervisor.migration import LibvirtMigrationDriver
from vmckpt.units import parse_rate
from vmckpt_lab import guests, lab, ledger, network
from vmckpt_lab.observer import client
from vmckpt_lab.plan import LabPlan

PROGRAMS = ("postcopy", "hybrid", "virsh")
_LIMIT = 300.0
_QUIET, _AFTER = 3.0, 3.0
"""Seconds before and after a migration for which the guest's writes are counted."""


def command(plan: LabPlan, program: str, source: str) -> list[str]:
    """Return the command line of a program."""
    target = OTHER[source]
    if program == "virsh":
        address = plan.host(target).address
        return [
            "virsh", "-c", f"qemu+tcp://{plan.host(source).address}/system", "migrate", "--live",
            "--p2p", "--persistent", "--undefinesource", "--unsafe", "--postcopy", "web1",
            f"qemu+tcp://{address}/system", "--migrateuri", f"tcp://{address}",
        ]  # fmt: skip
    how = {"postcopy": ["--mode", "postcopy"], "hybrid": ["--policy", "must-finish"]}[program]
    return [
        str(Path(sys.executable).parent / "vmckpt"), "migrate", "web1", "--from", source, "--to",
        target, *how, "--tls", "off", "-i", str(plan.inventory), "--json",
    ]  # fmt: skip


def written(plan: LabPlan) -> tuple[float, int]:
    """Return the time, and the pages that the guest had written then."""
    seen = client.status(plan.observer_socket, "web1")
    return seen.now, seen.pages_written


def start(words: list[str]) -> subprocess.Popen[bytes]:
    """Start a program without its output."""
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def move(plan: LabPlan, program: str, source: str) -> dict[str, Any]:
    """Move the guest with one program, and measure the migration."""
    known, run = inventory.load(plan.inventory), Run(program)
    async with (
        Hypervisor(known.host(source)) as here,
        Hypervisor(known.host(OTHER[source])) as there,
    ):
        guest = await find_guest(here, "web1")
        assert guest is not None
        driver = LibvirtMigrationDriver(here, there, guest.uuid)

        async def switch(iteration: int) -> None:
            if iteration and not run.switched:
                run.switched = True
                await driver.start_post_copy()

        t0, w0 = written(plan)
        await asyncio.sleep(_QUIET)
        t1, w1 = written(plan)
        process = start(command(plan, program, source))
        watch = Stopwatch(driver, run, switch if program == "virsh" else None)
        run.finished = await watch.watch(process, _LIMIT)
        await asyncio.sleep(_AFTER)
        t2, w2 = written(plan)
    if not run.finished:
        raise SystemExit(f"{program}: the migration failed")
    speed = (w1 - w0) / (t1 - t0)
    return {
        "program": program, "total_s": watch.last - watch.first,
        "lost_work_s": (t2 - t1) - (w2 - w1) / speed,
        "sent": max(sample.transferred for sample in watch.samples),
    }  # fmt: skip


def measure(plan: LabPlan, runs: int) -> list[dict[str, Any]]:
    """Run the programs in turn, each `runs` times."""
    found, place = [], "alpha"
    for number in range(runs):
        # The order rotates, so that each program starts from each host.
        for program in (*PROGRAMS[number % 3 :], *PROGRAMS[: number % 3]):
            one = asyncio.run(move(plan, program, place))
            place = OTHER[place]
            found.append(one)
            lost, sent = f"{one['lost_work_s']:5.1f} s of work lost", one["sent"] >> 20
            print(f"  {program:<9}{one['total_s']:6.1f} s, {lost}, {sent} MiB sent", flush=True)
            time.sleep(2.0)
    return found


def table(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Print and return the medians, with the ratio to virsh."""
    medians = {
        program: {
            key: statistics.median(one[key] for one in found if one["program"] == program)
            for key in ("total_s", "lost_work_s", "sent")
        }
        for program in PROGRAMS
    }
    virsh = medians["virsh"]["total_s"]
    for program, one in medians.items():
        one["of_virsh"] = one["total_s"] / virsh
        print(f"{program:<9}{one['total_s']:6.1f} s ({one['of_virsh']:.2f} of virsh),"
              f" {one['lost_work_s']:5.1f} s of the guest's work lost")  # fmt: skip
    return medians


def main() -> None:
    """Build a lab, measure, print the medians and remove the lab."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--runs", type=int, default=5)
    words.add_argument("--memory", default="256MiB")
    words.add_argument("--dirty", default="150MiB@100MiB/s")
    words.add_argument("--link", default="200mbit")
    words.add_argument("--json", type=Path)
    asked = words.parse_args()
    name = f"moment-{os.getpid()}"
    plan = lab.up(name)
    os.environ["VMCKPT_STATE"] = str(plan.folder / "state")  # removed with the lab
    try:
        guests.start(plan, "web1", "alpha", memory=asked.memory, dirty=asked.dirty)
        for host in ("alpha", "beta"):
            network.shape(plan, host, parse_rate(asked.link))
        time.sleep(5.0)
        found = measure(plan, asked.runs)
        whole = ledger.audit(plan, "web1").whole
    finally:
        lab.down(name)
    medians = table(found)
    if asked.json:
        guest = {"memory": asked.memory, "dirty": asked.dirty, "link": asked.link}
        result = {"guest": guest, "medians": medians, "ledgers_whole": whole, "runs": found}
        asked.json.write_text(json.dumps(result, indent=2) + "\n")
    if not whole:
        raise SystemExit("the ledgers do not agree")


if __name__ == "__main__":
    main()
