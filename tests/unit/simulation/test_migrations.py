"""Made-up migrations: what their samples, events, forecasts and reports tell."""

import json
from itertools import pairwise

import pytest

from vmckpt.journal.serialization import as_sampled
from vmckpt.model.migration import JobPhase, Outcome
from vmckpt.simulation import fleet as fleets
from vmckpt.simulation import migrations as moves
from vmckpt.simulation.fleet import Manner
from vmckpt.simulation.migrations import Made, Move


def made(manner: Manner = fleets.QUIET, began: float = 1000.0) -> Made:
    guest = next(one for one in fleets.made(3, 20, 1).guests if one.memory == 8 << 30)
    return moves.simulate(Move("m-1", guest, "r01-n03", manner, began))


MANNERS = (fleets.QUIET, fleets.EVACUATED, fleets.BUSY, fleets.STUBBORN, fleets.FAR)


@pytest.mark.parametrize("manner", MANNERS, ids=lambda one: str(one.policy))
def test_samples_go_on_and_what_is_left_is_sent(manner: Manner) -> None:
    one = made(manner)
    samples = one.samples(one.ends)
    sampled = [as_sampled(sample) for sample in samples]

    assert [sample.seq for sample in samples] == [*range(1, len(samples) + 1)]
    assert all(round(b.at - a.at, 3) == 0.2 for a, b in pairwise(samples))
    assert all(a.done <= b.done <= 1 for a, b in pairwise(sampled))
    for before, after in pairwise(sampled):
        a, b = before.sample, after.sample
        assert 0 <= b.remaining <= b.total
        assert a.transferred <= b.transferred
        assert a.iteration <= b.iteration
        if a.iteration == b.iteration and a.phase == b.phase:
            assert a.remaining - b.remaining == pytest.approx(b.transferred - a.transferred, abs=2)
    assert one.course.outcome is Outcome.COMPLETED


def test_one_that_does_not_converge_goes_on_by_post_copy_and_says_why() -> None:
    one = made(fleets.BUSY)
    decided = [event.values for event in one.events(one.ends) if event.kind == "decided"]

    assert [values["action"] for values in decided] == ["switch to post-copy"]
    assert decided[0]["reason"].startswith("there was no progress for")
    assert decided[0]["numbers"]["dirty_over_bandwidth"] > 0.9
    sampled = [as_sampled(sample) for sample in one.samples(one.ends)]
    assert any(one.estimate.converging is False for one in sampled)
    assert sampled[-1].sample.phase is JobPhase.POST_COPY


def test_its_forecast_and_its_report_are_as_real_ones() -> None:
    detail = made().detail(2000.0)
    report = detail.view.operation.report or {}

    assert made().detail(1000.2).forecast is None
    assert detail.forecast is not None
    assert detail.forecast.values.keys() == {"facts", "mode", "expected"}
    assert "samples" not in report
    assert report["forecast"]["score"]["total"]["measured"] > 0
    assert json.loads(json.dumps(detail.as_json()))["report"] == report
