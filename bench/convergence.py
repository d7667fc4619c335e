"""Compare vmckpt's policy `balanced` with virsh: guests that converge and guests that do not.

Four programs move every guest in turn, between the same two lab hosts and over the same link:

    vmckpt      vmckpt migrate, policy balanced (without TLS, like the others)
    virsh       virsh migrate --live
    throttled   virsh migrate --live --auto-converge
    schedule    virsh migrate --live --postcopy, with the steps of oVirt's policy "post-copy"
                entered manually: downtime 100 ms, 150 and 200 ms in the 2nd and 3rd pass, then
                post-copy

Each guest first moves there and back over an unlimited link, so that no program pays the cost of a
first migration. All programs are measured from outside in the same way: the time from the first
byte until the source has released the guest, and the longest silence that the observer recorded.
The ideal time of a row is the guest's memory in use, as sent by the first pass, divided by the
bandwidth of the stream, both as measured in vmckpt's run. A migration that takes five times as long
as a switch after the first pass would take is aborted and counts as not finished.

    sudo .venv/bin/python bench/convergence.py [--rows 1,5] [--json bench/results/convergence.json]
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from vmckpt import inventory
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.domains import find_guest
from vmckpt.hypervisor.migration import LibvirtMigrationDriver
from vmckpt.model.migration import JobSample
from vmckpt.units import Seconds, parse_rate
from vmckpt_lab import guests, lab, ledger, network
from vmckpt_lab.observer import client
from vmckpt_lab.plan import LabPlan

OTHER = {"alpha": "beta", "beta": "alpha"}
PEERS = ("vmckpt", "virsh", "throttled", "schedule")
_FIRST_LIMIT = 600.0


@dataclass(frozen=True, slots=True)
class Row:
    """A guest, and the link over which it is moved."""

    memory: str
    dirty: str
    link: str


ROWS = (
    Row("256MiB", "0MiB", "200mbit"),
    Row("512MiB", "256MiB", "200mbit"),
    Row("256MiB", "32MiB@4MiB/s", "200mbit"),
    Row("256MiB", "64MiB@20MiB/s", "200mbit"),
    Row("320MiB", "96MiB@25MiB/s", "200mbit"),
    Row("320MiB", "96MiB@48MiB/s", "200mbit"),
    Row("768MiB", "256MiB@48MiB/s", "400mbit"),
    Row("1024MiB", "384MiB@90MiB/s", "400mbit"),
    Row("512MiB", "64MiB@20MiB/s", "1gbit"),
    Row("1024MiB", "512MiB@60MiB/s", "1gbit"),
    Row("512MiB", "256MiB@20MiB/s", "off"),
    Row("1024MiB", "512MiB@80MiB/s", "off"),
)


@dataclass(slots=True)
class Run:
    """A program's migration of a guest, as seen from outside."""

    peer: str
    finished: bool = False
    total: float = 0.0
    """Seconds from the first byte to the end, or to the abort."""
    by_libvirt: float | None = None
    """Total time in libvirt's final statistics, in seconds, including the setup. None after
    post-copy, for which libvirt keeps no statistics."""
    setup: float = 0.0
    """Seconds from the command's start to the first byte."""
    blackout: float = 0.0
    undisturbed: float = 0.0
    transferred: int = 0
    first_pass: float = 0.0
    """Bytes sent in the first pass."""
    left_after_it: float = 0.0
    bandwidth: float = 0.0
    switched: bool = False
    whole: bool = False


def command(plan: LabPlan, peer: str, source: str) -> list[str]:
    """Return the command line of a program."""
    target = OTHER[source]
    if peer == "vmckpt":
        program = str(Path(sys.executable).parent / "vmckpt")
        return [
            program, "migrate", "web1", "--to", target, "--from", source, "--policy", "balanced",
            "--tls", "off", "-i", str(plan.inventory), "--json",
        ]  # fmt: skip
    address = plan.host(target).address
    more = {"virsh": [], "throttled": ["--auto-converge"], "schedule": ["--postcopy"]}[peer]
    return [
        "virsh", "-c", f"qemu+tcp://{plan.host(source).address}/system", "migrate", "--live",
        "--p2p", "--persistent", "--undefinesource", "--unsafe", *more, "web1",
        f"qemu+tcp://{address}/system", "--migrateuri", f"tcp://{address}",
    ]  # fmt: skip


def start(command: list[str], out: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a program. Its output goes to a file, because a full pipe would stop it."""
    return subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)


class Stopwatch:
    """Samples the source ten times per second, in the same way for every program."""

    def __init__(
        self, migrations: LibvirtMigrationDriver, run: Run, act: Callable[[int], Any] | None
    ) -> None:
        self._migrations = migrations
        self._run = run
        self._act = act
        self.samples: list[JobSample] = []
        self.first = self.last = 0.0

    async def watch(self, process: subprocess.Popen[bytes], limit: float) -> bool:
        """Sample until the program ends. Returns whether it succeeded within the limit.

        The limit is in seconds from the first byte. At the limit, the migration is aborted, except
        in post-copy.
        """
        while process.poll() is None:
            sample = await self._migrations.sample()
            now = time.monotonic()
            if sample is not None and sample.total:
                self.first = self.first or now
                self.last = now
                self.samples.append(sample)
                self._run.switched |= sample.phase == "post-copy"
                if self._act is not None and not self._run.switched:
                    await self._act(sample.iteration)
            if self.first and now - self.first > limit and not self._run.switched:
                await self._migrations.abort()
                process.wait(30)
                return False
            await asyncio.sleep(0.1)
        return process.returncode == 0


def schedule(migrations: LibvirtMigrationDriver) -> Callable[[int], Any]:
    """Return oVirt's steps. oVirt acts every ten seconds, this function at every sample."""
    done = {"pass": 0}

    async def act(iteration: int) -> None:
        if iteration <= done["pass"]:
            return
        done["pass"] = iteration
        if iteration in (1, 2, 3):
            await migrations.set_max_downtime(Seconds({1: 0.1, 2: 0.15, 3: 0.2}[iteration]))
        else:
            await migrations.start_post_copy()

    return act


async def move(plan: LabPlan, peer: str, source: str, limit: float) -> Run:
    """Move the guest with one program, and measure the migration."""
    known = inventory.load(plan.inventory)
    run = Run(peer)
    async with (
        Hypervisor(known.host(source)) as here,
        Hypervisor(known.host(OTHER[source])) as there,
    ):
        guest = await find_guest(here, "web1")
        assert guest is not None
        migrations = LibvirtMigrationDriver(here, there, guest.uuid)
        if peer != "vmckpt":
            await migrations.set_max_downtime(Seconds(0.3))
        watch = Stopwatch(migrations, run, schedule(migrations) if peer == "schedule" else None)
        quiet = client.status(
            plan.observer_socket, "web1", since=time.monotonic() - 2.0, until=time.monotonic()
        )
        began = time.monotonic()
        with tempfile.TemporaryFile() as out:
            process = start(command(plan, peer, source), out)
            run.finished = await watch.watch(process, limit)
            ended = time.monotonic()
            out.seek(0)
            told = out.read()
        await asyncio.sleep(0.3)
        totals = await migrations.totals() if run.finished and not run.switched else None
        run.by_libvirt = None if totals is None else float(totals.total)
        seen = client.status(plan.observer_socket, "web1", since=began, until=time.monotonic())
    run.setup = watch.first - began
    run.total = (watch.last if run.finished else ended) - watch.first
    run.blackout, run.undisturbed = seen.blackout, quiet.blackout
    run.transferred = max((sample.transferred for sample in watch.samples), default=0)
    if peer == "vmckpt":
        _ideal(run, json.loads(told)["samples"])
    return run


def _ideal(run: Run, samples: list[dict[str, Any]]) -> None:
    """Compute the first pass, the data that it left, and the bandwidth from vmckpt's samples."""
    moving = [sample for sample in samples if sample["iteration"]]
    later = next((s for s in moving if s["iteration"] > 1), moving[-1])
    run.first_pass = later["transferred"]
    run.left_after_it = later["remaining"] if later["iteration"] > 1 else 0
    sent = moving[-1]["transferred"] - moving[0]["transferred"]
    lasted = (moving[-1]["at_ms"] - moving[0]["at_ms"]) / 1000
    run.bandwidth = sent / lasted if lasted > 0 else float(moving[-1]["bandwidth"])


def turn(plan: LabPlan, place: str) -> tuple[list[Run], float]:
    """Run every program once, alternately there and back. Returns the runs and the ideal time."""
    runs, limit, ideal = [], _FIRST_LIMIT, 0.0
    for peer in PEERS:
        run = asyncio.run(move(plan, peer, place, limit))
        place = OTHER[place] if run.finished else place
        run.whole = ledger.audit(plan, "web1").whole
        runs.append(run)
        if peer == "vmckpt":
            ideal = run.first_pass / run.bandwidth
            limit = 5 * (run.first_pass + run.left_after_it) / run.bandwidth
        print(
            f"  {peer:<10}{'' if run.finished else 'not finished '}{run.total:6.1f} s", flush=True
        )
        time.sleep(2.0)
    return runs, ideal


def mean(one: Run, two: Run) -> Run:
    """Return the mean of the runs in both directions, with the longer blackout."""
    both = None
    if one.by_libvirt is not None and two.by_libvirt is not None:
        both = (one.by_libvirt + two.by_libvirt) / 2
    return replace(
        one,
        total=(one.total + two.total) / 2,
        by_libvirt=both,
        blackout=max(one.blackout, two.blackout),
        switched=one.switched or two.switched,
        whole=one.whole and two.whole,
    )


def measure(plan: LabPlan, row: Row) -> dict[str, Any]:
    """Measure a row: a new guest, moved by each program in turn."""
    for host in ("alpha", "beta"):
        network.shape(plan, host, None)
    guests.start(plan, "web1", "alpha", memory=row.memory, dirty=row.dirty)
    try:
        # The first arrival of a guest of this size takes longer: the host allocates the memory.
        for source in ("alpha", "beta"):
            subprocess.run(command(plan, "virsh", source), capture_output=True, check=True)
        for host in ("alpha", "beta"):
            network.shape(plan, host, None if row.link == "off" else parse_rate(row.link))
        time.sleep(3.0)
        runs, ideal = turn(plan, "alpha")
        if row.link == "off":
            # Without a limit, one direction is faster than the other, so each program does both.
            subprocess.run(command(plan, "virsh", "alpha"), capture_output=True, check=True)
            again, other = turn(plan, "beta")
            runs = [mean(one, two) for one, two in zip(runs, again, strict=True)]
            ideal = (ideal + other) / 2
    finally:
        guests.remove(plan, "web1")
    return {"row": asdict(row), "ideal_s": ideal, "runs": [asdict(run) for run in runs]}


def table(results: list[dict[str, Any]]) -> None:
    """Print the results, one line per row."""
    print(f"\n{'guest and link':<38}{'ideal':>8}", end="")
    print("".join(f"{peer:>11}" for peer in PEERS), end="")
    print(f"{'/ideal':>8}{'/virsh':>8}{'blackout':>10}  how")
    for result in results:
        runs = {run["peer"]: run for run in result["runs"]}
        mine, virsh, row = runs["vmckpt"], runs["virsh"], result["row"]
        times = "".join(
            f"{runs[p]['total']:>9.1f} s" if runs[p]["finished"] else f"{'–':>11}" for p in PEERS
        )
        beside = _beside(mine, virsh)
        dark = (mine["blackout"] - mine["undisturbed"]) * 1000
        how = "post-copy" if mine["switched"] else "pre-copy"
        broken = "" if all(run["whole"] for run in result["runs"]) else "  LEDGERS BROKEN"
        guest = f"{row['memory']:>8} {row['dirty']:<17}{row['link']:<12}{result['ideal_s']:>6.1f} s"
        share = mine["total"] / result["ideal_s"]
        print(f"{guest}{times}{share:>8.2f}{beside}{dark:>8.0f}ms  {how}{broken}")


def _beside(mine: dict[str, Any], virsh: dict[str, Any]) -> str:
    """Return vmckpt's time divided by virsh's.

    Uses libvirt's statistics if both runs have them, because they are exact to the millisecond;
    otherwise the stopwatch, which samples ten times per second.
    """
    if not virsh["finished"]:
        return f"{'':>8}"
    key = "total" if None in (mine["by_libvirt"], virsh["by_libvirt"]) else "by_libvirt"
    return f"{mine[key] / virsh[key]:8.2f}"


def main() -> None:
    """Build a lab, measure the rows, print the results and remove the lab."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--rows", help="only these rows, counted from 1, like 1,5,6")
    words.add_argument("--json", type=Path)
    asked = words.parse_args()
    chosen = [int(n) - 1 for n in asked.rows.split(",")] if asked.rows else range(len(ROWS))
    name = f"bench-{os.getpid()}"
    plan = lab.up(name)
    os.environ["VMCKPT_STATE"] = str(plan.folder / "state")  # removed with the lab
    results = []
    try:
        for index in chosen:
            print(f"{index + 1}: {ROWS[index]}", flush=True)
            results.append(measure(plan, ROWS[index]))
    finally:
        lab.down(name)
    table(results)
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
