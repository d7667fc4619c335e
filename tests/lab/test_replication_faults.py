"""Some rounds of the fault campaign (bench/replication_faults.py), the same ones each time."""

import os
from collections.abc import Iterator

import pytest

from bench.faults_plan import How, Kind, Round, Victim
from bench.faults_scene import scene
from bench.replication_faults import Campaign
from tests.lab.bench import traces

pytestmark = pytest.mark.long

TTL = 6.0
BOTH = (Victim.AGENT, Victim.WATCHDOG)


@pytest.fixture(scope="module")
def campaign() -> Iterator[Campaign]:
    name = f"e{os.getpid()}"
    with scene(name, TTL) as made:
        yield Campaign(made, TTL)
    assert traces(f"{name}/") + traces(f"{name}.") == []


@pytest.mark.parametrize(
    "chosen",
    [
        Round(seed=1, kind=Kind.SIGNALS, step="releasing", victims=(Victim.AGENT,), how=How.KILL),
        Round(seed=2, kind=Kind.SIGNALS, step="paused", victims=BOTH, how=How.KILL),
        Round(seed=3, kind=Kind.SIGNALS, step="acknowledged", victims=BOTH, how=How.STOP_FOR_GOOD),
        Round(seed=4, kind=Kind.ONE_WAY, step="sent", link=("backup", "primary"), seconds=3.0),
        Round(seed=5, kind=Kind.CARD, step="idle", plugs=True),
        Round(seed=6, kind=Kind.LOST_COMMIT, step="standby invalid", victims=BOTH, how=How.KILL),
        Round(seed=7, kind=Kind.SIGNALS, step="lease armed", victims=BOTH, how=How.KILL),
    ],
    ids=str,
)
def test_whatever_is_struck_there_is_one_copy_and_nothing_is_lost(
    campaign: Campaign, chosen: Round
) -> None:
    row = campaign.play(chosen)
    assert row["hit"]
    if chosen.seed in (2, 3):  # nothing of ours was there to end it
        assert row["home"][0] != row["home"][1]
    if chosen.kind is Kind.LOST_COMMIT:
        assert row["lease"]["state"] == "held"
        assert row["home"][0] == row["home"][1]
