"""A program that uses the Python API, on real hosts."""

import json
import subprocess
import sys

import pytest

from tests.lab.bench import Bench
from tests.lab.snapshots import SMALL, proofs
from tests.support.paths import ROOT

PROGRAM = """
import asyncio, json
from vmckpt.api import Client


async def main():
    client = Client()
    hosts = [one.name for one in await client.hosts() if one.error is None]
    before = [(one.name, one.host) for one in await client.guests()]
    plan = await client.plan("web1", "beta")
    moved = await client.migrate("web1", "beta", mode="precopy")
    taken = await client.create_snapshot("web1", name="of-the-api")
    listed = [(one.id, one.memory, one.error) for one in await client.snapshots("web1")]
    back = await client.restore_snapshot(taken.id, replace=True)
    away = await client.plan_evacuation("beta")
    gone = await client.evacuate("beta", why="a test")
    after = [(one.name, one.host) for one in await client.guests()]
    print(json.dumps({
        "hosts": hosts, "before": before, "possible": plan.possible,
        "moved": [moved.source, moved.target, moved.downtime], "job": moved.job,
        "taken": taken.id, "listed": listed, "back": [back.host, back.started],
        "away": [(one.guest, one.target) for one in away.moves],
        "gone": [(one.guest, one.target) for one in gone.moves],
        "remaining": len(gone.remaining), "after": after,
        "status": len(await client.status()),
    }))


asyncio.run(main())
"""


@pytest.mark.long
def test_a_program_moves_saves_restores_and_empties(kept: Bench) -> None:
    kept.guest(**SMALL)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=kept.environment, cwd=ROOT, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    try:
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["hosts"], told["before"]) == (["alpha", "beta"], [["web1", "alpha"]])
        assert told["possible"]
        assert told["moved"][:2] == ["alpha", "beta"]
        assert told["moved"][2] > 0
        assert told["listed"] == [[told["taken"], True, None]]
        assert told["back"] == ["beta", True]
        assert told["away"] == told["gone"] == [["web1", "alpha"]]
        assert (told["remaining"], told["after"], told["status"]) == (0, [["web1", "alpha"]], 0)
        assert kept.where() == ["alpha"]
        assert proofs(kept) == []
        # The jobs are in the journal like those of commands.
        assert kept.good("job", told["job"], "--json").json["outcome"] == "completed"
    finally:
        kept.run("maintenance", "leave", "beta")
