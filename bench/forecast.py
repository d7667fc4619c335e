"""Compare forecasts with the results of migrations, for guests and links drawn from a seed.

Each row has its own lab. A few moves of another guest provide the hosts' history. Then follow the
measurements and the forecast, and the migration, in pre-copy mode without rules and with a time
limit. The forecast is recorded before the migration begins. Two forecasts are made from the same
measurement: with the history and without it.

    sudo .venv/bin/python bench/forecast.py [--rows 12] [--seed 1] [--only 3,7]
        [--json bench/results/forecast.json]
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vmckpt import inventory
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.domains import find_guest
from vmckpt.journal.migration_history import PastMove
from vmckpt.migration.forecast import history as forecast_history
from vmckpt.migration.forecast.choose_mode import Measured, score
from vmckpt.migration.forecast.forecast import Facts, Forecast, forecast, in_words
from vmckpt.migration.forecast.measure import measure
from vmckpt.model.guest import Guest
from vmckpt.model.migration import LinkSeen, Mode
from vmckpt.policy import loader
from vmckpt.policy.model import Policy
from vmckpt.remote.ssh import Remote
from vmckpt.units import MIB, Bytes, BytesPerSecond, Seconds, parse_rate
from vmckpt_lab import guests, lab
from vmckpt_lab.plan import LabPlan

POLICY = """\
version: vmckpt/v1
name: forecast-bench
mode: precopy
limits: {max_downtime: 300ms, time: 60s}
transport: {tls: off}
forecast: {probe: off}
"""
LINKS = ("200mbit", "400mbit", "1gbit", "off")
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
    program = str(Path(sys.executable).parent / "vmckpt")
    command = [program, "migrate", name, "--to", to, "-i", str(plan.inventory), "--json"]
    command += ["--policy", str(policy), "--mode", "precopy"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise SystemExit(
            f"{' '.join(command)} exited with {done.returncode}: {done.stderr}"
        ) from None
    return report


def remembered(report: dict[str, Any]) -> PastMove:
    """Convert a report to the form in which the journal provides it to forecasts."""
    moving = [(p["bandwidth"], p["lasted_ms"]) for p in report["passes"] if p["bandwidth"]]
    whole = sum(lasted for _, lasted in moving)
    mean = round(sum(b * lasted for b, lasted in moving) / whole) if whole else None
    return PastMove(
        id="m-bench", guest=report["guest"], guest_uuid=None, source=report["source"],
        target=report["target"], ended_at=0.0, outcome=report["outcome"], mode="precopy",
        total=Seconds(report["total_ms"] / 1000), setup=None, downtime=None,
        observed_downtime=None, transferred=Bytes(report["bytes_transferred"]),
        bandwidth=None if mean is None else BytesPerSecond(mean), dirty_rates=(),
        dirty_probes=(), limit=None,
    )  # fmt: skip


def history(plan: LabPlan, policy: Path, moves: int, *, large: bool) -> list[PastMove]:
    """Move an idle guest from alpha to beta repeatedly. Returns these moves.

    The moves back are not returned: they would be the history of a different pair of hosts.
    """
    size, dirty = ("768MiB", "600MiB@1MiB/s") if large else ("128MiB", "16MiB@1MiB/s")
    guests.start(plan, "past", "alpha", memory=size, dirty=dirty, disk="0")
    found = []
    for _ in range(moves):
        report = migrate(plan, "past", "beta", policy)
        if report["outcome"] == "completed":
            found.append(remembered(report))
            migrate(plan, "past", "alpha", policy)
    guests.remove(plan, "past")
    return found


async def look(plan: LabPlan, policy: Policy) -> tuple[Guest, Facts, float]:
    """Measure without history. Returns the guest, the facts and the duration in seconds."""
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
        facts = await measure(source, target, guest, policy, [], probe=PROBE, remotes=(one, other))
        return guest, facts, time.monotonic() - began


def with_history(facts: Facts, past: Sequence[PastMove], link: LinkSeen | None) -> Facts:
    """Return the measurements, combined with data from past moves."""
    carried = forecast_history.bandwidth(link, past, encrypted=False, connections=1)
    setup, setup_words = forecast_history.setup(past)
    return replace(
        facts, bandwidth=carried.first, later=carried.later, setup=setup,
        basis=(*facts.basis, *carried.basis, setup_words),
    )  # fmt: skip


def run(row: Row, policy_file: Path) -> dict[str, Any]:
    """Measure one row in its own lab."""
    policy = loader.load_file(policy_file)
    name = f"fc-{os.getpid()}-{row.number}"
    plan = lab.up(name, shape=None if row.link == "off" else parse_rate(row.link))
    os.environ["VMCKPT_STATE"] = str(plan.folder / "state")  # removed with the lab
    try:
        past = history(plan, policy_file, 3, large=row.link in ("1gbit", "off"))
        guests.start(
            plan, "web1", "alpha", memory=f"{row.memory_mib}MiB", disk="0",
            dirty=f"{row.region_mib}MiB@{row.rate_mib}MiB/s",
        )  # fmt: skip
        time.sleep(1.0)
        load = os.getloadavg()[0]
        guest, plain, took = asyncio.run(look(plan, policy))
        taught = with_history(plain, past, plain.link)
        expected = {
            "with_history": forecast(taught, policy, Mode.PRECOPY, guest),
            "without": forecast(plain, policy, Mode.PRECOPY, guest),
        }
        for kind, one in expected.items():
            print(f"row {row.number} {kind}: {in_words(one)}", flush=True)
        report = migrate(plan, "web1", "beta", policy_file)
    finally:
        lab.down(name)
    found = {"row": asdict(row), "load": load, "probe_s": round(took, 2), "facts": taught.as_json()}
    return {**found, **result(expected, report)}


def result(expected: dict[str, Forecast], report: dict[str, Any]) -> dict[str, Any]:
    """Return the result of the migration, and the scores of the forecasts."""
    completed = report["outcome"] == "completed"
    down = report["downtime_ms"]
    measured = Measured(
        completed=completed,
        total=Seconds(report["total_ms"] / 1000),
        downtime=None if down is None else Seconds(down / 1000),
        sent=Bytes(report["bytes_transferred"]),
    )
    return {
        "forecast": {kind: one.as_json() for kind, one in expected.items()},
        "outcome": report["outcome"],
        "measured": asdict(measured),
        "passes": report["passes"],
        "score": {kind: score(one, measured).as_json() for kind, one in expected.items()},
    }


def table(rows: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Print the rows. Returns how many ranges contained the result, and how many are narrow."""
    print(f"\n{kind}\n  row guest        writes      link     outcome    "
          "total s (range)         downtime ms (range)    MiB sent (range)")  # fmt: skip
    tally: dict[str, list[float]] = {}
    for one in rows:
        row, marks = one["row"], one["score"][kind]
        words = []
        for what, scale in (("total", 1.0), ("downtime", 1e3), ("sent", 1 / MIB)):
            mark = marks[what]
            if mark is None or None in mark["expected"]:  # no forecast, or one without a high end
                words.append(f"{'-':<23}")
                continue
            low, high = (scale * end for end in mark["expected"])
            sign = " " if mark["covered"] else "!"
            shown = f"{scale * mark['measured']:.4g}{sign}({low:.4g}..{high:.4g})"
            words.append(f"{shown:<23}")
            held, narrow, of = tally.get(what, [0, 0, 0])
            tally[what] = [held + mark["covered"], narrow + (mark["width"] <= 0.3), of + 1]
        right = {True: "", False: " WRONG", None: " unsure"}[marks["converged"]]
        print(f"  {row['number']:>3} {row['memory_mib']:>5} MiB"
              f" {row['region_mib']:>5}@{row['rate_mib']:<4} {row['link']:>8}"
              f"  {one['outcome'] + right:<18} {' '.join(words)}")  # fmt: skip
    verdicts = [one["score"][kind]["converged"] for one in rows]
    summary = {
        what: {"covered": held, "within_30_percent": narrow, "of": of}
        for what, (held, narrow, of) in tally.items()
    }
    summary["converges"] = {
        "right": verdicts.count(True), "wrong": verdicts.count(False),
        "unsure": verdicts.count(None),
    }  # fmt: skip
    for what, numbers in summary.items():
        print(f"  {what}: {numbers}")
    return summary


def main() -> None:
    """Draw and measure the rows, print the table and save the results."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--rows", type=int, default=12)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--only", default="", help="only the rows with these numbers, like 3,7")
    words.add_argument("--json", type=Path)
    asked = words.parse_args()
    chosen = {int(one) for one in asked.only.split(",") if one}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder, "forecast-bench.yaml")
        policy.write_text(POLICY)
        for row in draw(asked.seed, asked.rows):
            if not chosen or row.number in chosen:
                found.append(run(row, policy))
                if asked.json:
                    write(asked.json, asked.seed, found, {})
    summary = {kind: table(found, kind) for kind in ("with_history", "without")}
    if asked.json:
        write(asked.json, asked.seed, found, summary)


def write(path: Path, seed: int, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Save the rows so far, with their seed."""
    path.write_text(json.dumps({"seed": seed, "summary": summary, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
