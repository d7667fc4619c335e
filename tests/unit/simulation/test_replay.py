"""A recorded migration, played again in the time that it took."""

import json
from pathlib import Path

import pytest

from tests.support.clocks import Clock
from tests.support.paths import TRACES
from vmckpt.journal.jobs import JobView
from vmckpt.simulation.replay import Replayed


async def played(path: Path) -> tuple[Replayed, list[JobView]]:
    clock = Clock()
    replay = Replayed(path, clock)
    seen: list[JobView] = []
    while not seen or seen[-1].operation.active:
        seen += await replay.jobs(1)
        clock.now += 1.0
    return replay, seen


@pytest.mark.parametrize(
    ("name", "outcome", "host"),
    [("maintenance", "completed", "target"), ("dead-network", "failed", "source")],
)
async def test_a_trace_is_played_to_its_outcome(name: str, outcome: str, host: str) -> None:
    replay, seen = await played(TRACES / f"{name}.jsonl")
    detail = await replay.job(seen[-1].operation.id)

    assert detail.view.operation.outcome == outcome
    assert [one.host for one in (await replay.fleet()).guests] == [host]
    assert not await replay.jobs(0)
    done = [one.sample.done for one in seen if one.sample is not None]
    assert done == sorted(done)
    assert (await replay.ask(["plan"], 80)).code == 2
    assert replay.start(["cancel", "m-trace"], 80).said().text == "not available in a replay\n"


async def test_a_traces_decisions_are_told_when_they_were_made(tmp_path: Path) -> None:
    lines = (TRACES / "maintenance.jsonl").read_text().splitlines()
    decision = {
        "at_ms": 2100.0, "action": "switch to post-copy", "rule": "stalled", "acted": True,
        "reason": "no progress", "numbers": {"max_downtime_ms": 500.0},
    }  # fmt: skip
    path = tmp_path / "one.jsonl"
    path.write_text("\n".join([*lines[:6], json.dumps({"decision": decision}), *lines[6:-1]]))
    replay, _ = await played(path)
    detail = await replay.job("m-trace")

    assert detail.view.operation.outcome == "unknown"  # it breaks off
    (told,) = [one for one in detail.events if one.kind == "decided"]
    assert (told.at, told.values["rule"]) == (2.1, "stalled")
    assert [one.at for one in detail.events] == sorted(one.at for one in detail.events)
    assert list((await replay.news("m-trace", told.seq, 3)).samples) == list(detail.samples[3:])


async def test_what_was_decided_after_the_last_sample_is_told_at_the_end(tmp_path: Path) -> None:
    lines = (TRACES / "maintenance.jsonl").read_text().splitlines()
    decision = {"at_ms": 9e6, "action": "abort", "rule": "mine", "reason": "x", "acted": True}
    path = tmp_path / "one.jsonl"
    path.write_text("\n".join([*lines, json.dumps({"decision": {**decision, "numbers": {}}})]))
    replay, seen = await played(path)
    detail = await replay.job("m-trace")

    assert not seen[-1].operation.active
    assert [one.values["rule"] for one in detail.events if one.kind == "decided"] == ["mine"]
