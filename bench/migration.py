"""Move guests with vmckpt and with variants of virsh, in turn over the same link.

    sudo bench/all --only migration

Each guest first moves there and back over an unlimited link, so that no program pays the cost of a
first arrival. All programs are measured from outside in the same way: the time from the first byte
until the source has released the guest, and the longest silence that the observer recorded. The
limit of a total is the guest's memory in use, as sent by vmckpt's first pass, divided by the
bandwidth of a plain socket between the same hosts. A migration that takes four times as long as
vmckpt's is aborted and does not count.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from bench import limits
from bench.figure import Figure, Result, best, median
from bench.hands import versions
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
PEERS = {
    "virsh": [],
    "virsh --auto-converge": ["--auto-converge"],
    "virsh --parallel": ["--parallel", "--parallel-connections", "2"],
    "virsh --postcopy-after-precopy": ["--postcopy", "--postcopy-after-precopy"],
}
"""Variants of `virsh migrate --live`, by name."""
_CONVERGING = ("virsh", "virsh --parallel", "virsh --postcopy-after-precopy")
_DIVERGING = ("virsh --auto-converge", "virsh --postcopy-after-precopy")
OURS = "vmckpt"
_FIRST_LIMIT = 600.0


@dataclass(frozen=True, slots=True)
class Case:
    """A guest, and the link over which it is moved."""

    memory: str
    dirty: str
    link: str
    turns: int
    peers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.memory}, {self.dirty.replace('@', ' at ')}, {self.link}"


CASES = (
    Case("256MiB", "160MiB@20MiB/s", "1gbit", 3, _CONVERGING),
    Case("1GiB", "768MiB@20MiB/s", "1gbit", 3, _CONVERGING),
    Case("4GiB", "3456MiB@20MiB/s", "1gbit", 2, _CONVERGING),
    # Writes faster than the link can send: pre-copy alone does not end.
    Case("512MiB", "384MiB@90MiB/s", "400mbit", 1, _DIVERGING),
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


def command(plan: LabPlan, program: str, source: str) -> list[str]:
    """Return the command line of a program; all move without TLS."""
    target = OTHER[source]
    if program == OURS:
        return [
            sys.executable, "-m", "vmckpt.cli.app", "migrate", "web1", "--to", target, "--from",
            source, "--policy", "balanced", "--tls", "off", "-i", str(plan.inventory), "--json",
        ]  # fmt: skip
    return virsh(plan, "web1", source, target, *PEERS[program])


def virsh(plan: LabPlan, guest: str, source: str, target: str, *more: str) -> list[str]:
    """Return the command line of a migration with virsh: same flags and address as vmckpt."""
    address = plan.host(target).address
    return [
        "virsh", "-c", f"qemu+tcp://{plan.host(source).address}/system", "migrate", "--live",
        "--p2p", "--persistent", "--undefinesource", "--unsafe", *more, guest,
        f"qemu+tcp://{address}/system", "--migrateuri", f"tcp://{address}",
    ]  # fmt: skip


def start(command: list[str], out: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a program. Its output goes to a file, because a full pipe would stop it."""
    return subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)


class Stopwatch:
    """Samples the source ten times per second, in the same way for every program."""

    def __init__(self, migrations: LibvirtMigrationDriver, run: Run) -> None:
        self._migrations = migrations
        self._run = run
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
            if self.first and now - self.first > limit and not self._run.switched:
                await self._migrations.abort()
                process.wait(30)
                return False
            await asyncio.sleep(0.1)
        return process.returncode == 0


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
        if peer != OURS:
            await migrations.set_max_downtime(Seconds(0.3))
        watch = Stopwatch(migrations, run)
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
    if peer == OURS:
        _first_pass(run, json.loads(told)["samples"])
    return run


def _first_pass(run: Run, samples: list[dict[str, Any]]) -> None:
    """Compute the first pass, the data that it left, and the bandwidth from vmckpt's samples."""
    moving = [sample for sample in samples if sample["iteration"]]
    later = next((s for s in moving if s["iteration"] > 1), moving[-1])
    run.first_pass = later["transferred"]
    run.left_after_it = later["remaining"] if later["iteration"] > 1 else 0
    sent = moving[-1]["transferred"] - moving[0]["transferred"]
    lasted = (moving[-1]["at_ms"] - moving[0]["at_ms"]) / 1000
    run.bandwidth = sent / lasted if lasted > 0 else float(moving[-1]["bandwidth"])


def turn(plan: LabPlan, programs: Sequence[str], place: str, runs: list[Run]) -> str:
    """Run every program once, and append the runs. Returns where the guest is then."""
    for program in programs:
        ours = [run.total for run in runs if run.peer == OURS]
        limit = 4 * max(ours) if ours else _FIRST_LIMIT
        run = asyncio.run(move(plan, program, place, limit))
        place = OTHER[place] if run.finished else place
        runs.append(run)
        state = "" if run.finished else "not finished "
        print(f"  {program:<32}{state}{run.total:6.1f} s", flush=True)
        time.sleep(1.5)
    return place


def moved(plan: LabPlan, case: Case) -> dict[str, Any]:
    """Measure a case: a new guest, moved by each program in turn."""
    for host in ("alpha", "beta"):
        network.shape(plan, host, None)
    guests.start(plan, "web1", "alpha", memory=case.memory, dirty=case.dirty)
    try:
        # The first arrival of a guest of this size takes longer: the host allocates the memory.
        for source in ("alpha", "beta"):
            subprocess.run(virsh(plan, "web1", source, OTHER[source]),
                           capture_output=True, check=True)  # fmt: skip
        for host in ("alpha", "beta"):
            network.shape(plan, host, parse_rate(case.link))
        bandwidth, round_trip = limits.link(plan, "alpha", "beta")
        runs: list[Run] = []
        place, programs = "alpha", [OURS, *case.peers]
        for number in range(case.turns):
            # The first turn begins with vmckpt, whose time limits those of the others.
            place = turn(plan, programs[:: -1 if number % 2 else 1], place, runs)
        whole = ledger.audit(plan, "web1").whole
    finally:
        guests.remove(plan, "web1")
    return {"case": asdict(case), "bandwidth": bandwidth, "round_trip": round_trip,
            "ledgers_whole": whole, "runs": [asdict(run) for run in runs]}  # fmt: skip


def figures(case: Case, told: dict[str, Any]) -> list[Figure]:
    """Return the figures of a case. Pure."""
    runs = [run for run in told["runs"] if run["finished"]]

    def of(key: str) -> dict[str, float | None]:
        return {
            name: median(_value(run, key) for run in runs if run["peer"] == name)
            for name in (OURS, *case.peers)
        }

    first = median(run["first_pass"] for run in runs if run["peer"] == OURS) or 0.0
    made = []
    for key, what, unit, limit, limit_is in (
        ("total", "total", "s", first / told["bandwidth"], "link"),
        ("blackout", "downtime", "ms", 1e3 * told["round_trip"], "round trip"),
    ):
        values = of(key)
        ours = values.pop(OURS)
        peer, peer_is = best(values)
        if ours is not None:
            made.append(
                Figure(what=f"{case}: {what}", unit=unit, ours=ours, limit=limit, limit_is=limit_is,
                       peer=peer, peer_is=peer_is)
            )  # fmt: skip
    return made


def _value(run: dict[str, Any], key: str) -> float:
    if key == "blackout":
        return float(1e3 * (run["blackout"] - run["undisturbed"]))
    # libvirt's statistics are exact to the millisecond; the stopwatch samples every 0.1 s.
    return float(run["total"] if run["by_libvirt"] is None else run["by_libvirt"])


def measure(*, quick: bool) -> Result:
    """Measure all cases in a lab; `quick`: only the first, once."""
    cases = (replace(CASES[0], turns=1),) if quick else CASES
    name = f"bm{os.getpid()}"
    plan = lab.up(name)
    os.environ["VMCKPT_STATE"] = str(plan.folder / "state")  # removed with the lab
    rows: list[Figure] = []
    raw = []
    try:
        for case in cases:
            print(case, flush=True)
            raw.append(moved(plan, case))
            rows += figures(case, raw[-1])
    finally:
        lab.down(name)
    if not all(one["ledgers_whole"] for one in raw):
        raise SystemExit("the ledgers do not agree")
    return Result(figures=tuple(rows), versions=versions(), raw=raw)
