"""Snapshots by schedule on real hosts: killed in the middle, started again, restored from far."""

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.lab.bench import Bench, Told, finish, until
from tests.lab.snapshots import SMALL, left, proofs
from vmckpt.journal.store import Journal
from vmckpt.store.backend.factory import backend_of
from vmckpt.store.repository import Store

POLICY = """\
version: vmckpt/v1
name: often
snapshots:
  - name: often
    every: 5s
    keep: {last: 2}
    copies: [{to: far}]
    verify: {every: 1d}
"""


def taking(bench: Bench) -> bool:
    with Journal(bench.plan.folder / "state" / "journal.db") as journal:
        return any(one.kind == "snapshot" for one in journal.operations(active=True))


def spoil(store: Path) -> None:
    """One bit in the middle of each pack."""
    for path in store.glob("packs/*/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@dataclass(frozen=True)
class Tiers:
    """A lab with two stores, and a policy with a schedule."""

    bench: Bench
    near: Path
    far: Path
    inventory: Path
    policy: Path

    @property
    def run(self) -> tuple[str, ...]:
        """The command."""
        return ("run", "web1", "--policy", str(self.policy), "--json", *self.beside)

    @property
    def beside(self) -> tuple[str, str]:
        return ("--inventory", str(self.inventory))

    def ids(self, folder: Path) -> set[str]:
        return {one.id for one in Store.open(backend_of(str(folder))).manifests()}


@pytest.fixture
def tiers(kept: Bench) -> Iterator[Tiers]:
    shared, folder = kept.plan.shared, kept.plan.folder
    made = Tiers(
        kept, shared / "snapshots", shared / "far", folder / "tiers.yaml", folder / "often.yaml"
    )
    told = yaml.safe_load(kept.plan.inventory.read_text())
    told["stores"] = {**told["stores"], "far": str(made.far)}
    made.inventory.write_text(yaml.safe_dump(told, sort_keys=False))
    made.policy.write_text(POLICY)
    made.far.mkdir()
    kept.good("snapshot", "init", "--store", "far", *made.beside)
    yield made
    kept.inside("alpha", "rm", "-rf", str(made.far))
    made.inventory.unlink()
    made.policy.unlink()


@pytest.mark.long
def test_schedules_survive_a_kill_and_the_far_store_mends_the_near_one(tiers: Tiers) -> None:
    bench = tiers.bench
    bench.guest(**SMALL)
    shown = bench.good(*tiers.run, "--dry-run")
    assert [one["why"] for one in shown.json["schedules"]] == ["no snapshot yet"], shown.err

    first = Told(bench.start(*tiers.run))
    first.until("took", 2)
    until(lambda: taking(bench), limit=60)
    first.process.kill()
    first.process.communicate()

    second = Told(bench.start(*tiers.run))
    for event, times in (("took", 3), ("copied", 1), ("pruned", 1)):
        second.until(event, times)
    second.process.send_signal(signal.SIGTERM)
    done = finish(second.process)
    assert (done.code, json.loads(done.out.splitlines()[-1])["event"]) == (0, "stopped"), done.err
    assert (left(bench), proofs(bench)) == ([], [])

    bench.good(*tiers.run, "--once")
    assert tiers.ids(tiers.near) <= tiers.ids(tiers.far)
    assert len(tiers.ids(tiers.near)) <= 4 < len(tiers.ids(tiers.far))
    rows = bench.good("snapshot", "list", "--json", *tiers.beside).json
    assert True in [(row["verified"] or {}).get("good") for row in rows]
    _restored_from_far(tiers, max(rows, key=lambda row: float(row["made_at"]))["id"])


def _restored_from_far(tiers: Tiers, newest: str) -> None:
    bench = tiers.bench
    spoil(tiers.near)
    back = bench.good("snapshot", "restore", newest, "--replace", "--json", *tiers.beside).json
    assert any("read from another store" in one for one in back["warnings"])
    assert bench.where() == ["alpha"]
    assert proofs(bench) == []
