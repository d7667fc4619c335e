"""Compare forecasts with the results of migrations, for guests and links drawn from two seeds.

    sudo bench/all --only forecast

Each guest is measured, a forecast is recorded, and the guest migrates in pre-copy mode without
rules and with a time limit. If the range of the total time is wider than ±30 %, the guest returns
and migrates twice more: the spread of the results is the least width that any forecast could have.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.figure import Figure, Result
from bench.hands import versions
from bench.migration import PEERS, virsh
from vmckpt import inventory
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.domains import find_guest
from vmckpt.migration.forecast import measure as measurements
from vmckpt.migration.forecast.choose_mode import Measured, score
from vmckpt.migration.forecast.forecast import Facts, Forecast, forecast, in_words
from vmckpt.model.guest import Guest
from vmckpt.model.migration import Mode
from vmckpt.policy import loader
from vmckpt.policy.model import Policy
from vmckpt.remote.ssh import Remote
from vmckpt.units import MIB, Bytes, Seconds, parse_rate
from vmckpt_lab import guests, lab, network
from vmckpt_lab.plan import LabPlan

POLICY = """\
version: vmckpt/v1
name: forecast-bench
mode: precopy
limits: {max_downtime: 300ms, time: 30s}
transport: {tls: off}
forecast: {probe: off}
"""
SEEDS, ROWS = (2026, 5), 6
LINKS = ("200mbit", "400mbit", "1gbit", "off")
NARROW = 0.3
# A guest under TCG cannot write much faster than this, in bytes per second, whatever the link.
FASTEST = 150 * MIB
PROBE = Seconds(10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A guest and a link."""

    number: int
    memory_mib: int
    region_mib: int
    rate_mib: int
    link: str


def draw(seed: int, rows: int) -> list[Row]:
    """Draw rows from a seed. The first rows do not depend on the number of rows."""
    dice = random.Random(seed)
    found = []
    for number in range(1, rows + 1):
        memory, link = dice.choice((256, 384, 512, 768, 1024)), dice.choice(LINKS)
        region = dice.randint(16, int(0.9 * (memory - 96)))
        carried = FASTEST / 2 if link == "off" else min(FASTEST / 2, parse_rate(link))
        rate = max(1, round(2 * carried * dice.random() / MIB))
        found.append(
            Row(number=number, memory_mib=memory, region_mib=region, rate_mib=rate, link=link)
        )
    return found


def migrate(plan: LabPlan, name: str, to: str, policy: Path) -> dict[str, Any]:
    """Migrate a guest with vmckpt. Returns the report."""
    command = [
        sys.executable,
        "-m",
        "vmckpt.cli.app",
        "migrate",
        name,
        "--to",
        to,
        "-i",
        str(plan.inventory),
        "--json",
    ]
    command += ["--policy", str(policy), "--mode", "precopy"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise SystemExit(
            f"{' '.join(command)} exited with {done.returncode}: {done.stderr}"
        ) from None
    return report


async def look(plan: LabPlan, policy: Policy) -> tuple[Guest, Facts, float]:
    """Measure as before a migration. Returns the guest, the facts and the duration in seconds."""
    known = inventory.load(plan.inventory)
    here, there = known.host("alpha"), known.host("beta")
    async with (
        Hypervisor(here) as source,
        Hypervisor(there) as target,
        Remote(here) as one,
        Remote(there) as other,
    ):
        guest = await find_guest(source, "web1")
        assert guest is not None
        began = time.monotonic()
        facts = await measurements.measure(
            source, target, guest, policy, [], probe=PROBE, remotes=(one, other)
        )
        return guest, facts, time.monotonic() - began


def run(plan: LabPlan, row: Row, policy_file: Path) -> dict[str, Any]:
    """Measure one row."""
    policy = loader.load_file(policy_file)
    for one in plan.hosts:
        network.shape(plan, one.name, None if row.link == "off" else parse_rate(row.link))
    guests.start(
        plan, "web1", "alpha", memory=f"{row.memory_mib}MiB", disk="0",
        dirty=f"{row.region_mib}MiB@{row.rate_mib}MiB/s",
    )  # fmt: skip
    try:
        time.sleep(1.0)
        load = os.getloadavg()[0]
        guest, facts, took = asyncio.run(look(plan, policy))
        expected = forecast(facts, policy, Mode.PRECOPY, guest)
        print(f"{row}: {in_words(expected)}", flush=True)
        reports = [migrate(plan, "web1", "beta", policy_file)]
        found = {"row": asdict(row), "load": load, "probe_s": round(took, 2),
                 "facts": facts.as_json(), **result(expected, reports[0])}  # fmt: skip
        total = found["score"]["total"]
        if total is not None and (total["width"] or 0.0) > NARROW:
            for _ in range(2):
                if reports[-1]["outcome"] == "completed":
                    back(plan)
                reports.append(migrate(plan, "web1", "beta", policy_file))
        found["totals_s"] = [one["total_ms"] / 1000 for one in reports]
        return found
    finally:
        guests.remove(plan, "web1")


def back(plan: LabPlan) -> None:
    """Move the guest back, in post-copy, which always ends."""
    words = virsh(plan, "web1", "beta", "alpha", *PEERS["virsh --postcopy-after-precopy"])
    subprocess.run(words, check=True, capture_output=True)


def result(expected: Forecast, report: dict[str, Any]) -> dict[str, Any]:
    """Return the result of the migration, and the score of the forecast."""
    down = report["downtime_ms"]
    measured = Measured(
        completed=report["outcome"] == "completed",
        total=Seconds(report["total_ms"] / 1000),
        downtime=None if down is None else Seconds(down / 1000),
        sent=Bytes(report["bytes_transferred"]),
    )
    return {
        "forecast": expected.as_json(), "outcome": report["outcome"],
        "measured": asdict(measured), "passes": report["passes"],
        "score": score(expected, measured).as_json(),
    }  # fmt: skip


def figures(rows: Sequence[dict[str, Any]]) -> tuple[Figure, ...]:
    """Return the figures. Pure."""
    marks = [row["score"]["total"] for row in rows]
    bounded = [one for one in marks if one is not None and None not in one["expected"]]
    held = sum(one["covered"] for one in bounded)
    narrow = sum(one["width"] <= NARROW for one in bounded)
    verdicts = [row["score"]["converged"] for row in rows]
    wide = [row for row in rows if len(row["totals_s"]) > 1]
    return (
        Figure(what="ranges of the total time that contain the result", unit="ranges", ours=held,
               limit=len(bounded), limit_is="all with an upper end"),
        Figure(what="of these, at most ±30 % wide", unit="ranges", ours=narrow,
               limit=len(bounded), limit_is="all with an upper end"),
        Figure(what="correct about whether pre-copy converges", unit="forecasts",
               ours=verdicts.count(True), limit=len(rows), limit_is="all"),
        Figure(what="wrong about it", unit="forecasts", ours=verdicts.count(False)),
        *(Figure(what=f"half the width for {_guest(row['row'])}", unit="%",
                 ours=100 * row["score"]["total"]["width"], limit=100 * spread(row["totals_s"]),
                 limit_is="spread of 3 results")
          for row in wide),
    )  # fmt: skip


def spread(totals: Sequence[float]) -> float:
    """Return half the width of the range of the results, as a share of its middle."""
    return (max(totals) - min(totals)) / (max(totals) + min(totals))


def _guest(row: dict[str, Any]) -> str:
    return f"{row['region_mib']} MiB at {row['rate_mib']} MiB/s, {row['link']}"


def measure(*, quick: bool) -> Result:
    """Measure the rows of both seeds; `quick`: one row of each."""
    name = f"fc{os.getpid()}"
    plan = lab.up(name)
    os.environ["VMCKPT_STATE"] = str(plan.folder / "state")  # removed with the lab
    try:
        policy = plan.folder / "forecast-bench.yaml"
        policy.write_text(POLICY)
        rows = [
            {"seed": seed, **run(plan, row, policy)}
            for seed in SEEDS
            for row in draw(seed, 1 if quick else ROWS)
        ]
    finally:
        lab.down(name)
    return Result(figures=figures(rows), versions=versions(), raw=rows)
