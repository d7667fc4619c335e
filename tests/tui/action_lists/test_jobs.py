"""What can be done with what is under way, and what it costs."""

import dataclasses
from typing import Any

import pytest

from tests.support.dashboards import MODEL
from tests.tui.still import BROKEN, DRAIN, ENDED, MOVE, PROTECT
from vmckpt.journal.jobs import JobView
from vmckpt.units import GIB
from vmckpt_tui import actions
from vmckpt_tui.action_lists.all import BY_NAME
from vmckpt_tui.actions import Scene, Where


def of(job: JobView | None, **more: Any) -> Scene:
    return Scene(where=Where.JOBS, model=MODEL, job=job, **more)


def in_phase(phase: str) -> JobView:
    return dataclasses.replace(MOVE, operation=dataclasses.replace(MOVE.operation, phase=phase))


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (None, "no job is selected"),
        (ENDED, "the job has ended"),
        (PROTECT, "a job of kind protect accepts no requests"),
        (in_phase("post-copy"), "post-copy cannot be cancelled"),
        (MOVE, None),
        (DRAIN, None),
    ],
)
def test_only_what_is_under_way_and_can_go_back_is_cancelled(
    job: JobView | None, why: str | None
) -> None:
    assert actions.why_not(BY_NAME["cancel"], of(job)) == why


def test_a_whole_host_has_neither_bandwidth_nor_post_copy() -> None:
    for name in ("bandwidth", "downtime", "postcopy"):
        assert actions.why_not(BY_NAME[name], of(DRAIN)) == "the job moves several guests"
        assert actions.why_not(BY_NAME[name], of(MOVE)) is None


def test_in_post_copy_the_bandwidth_can_be_set_and_the_downtime_cannot() -> None:
    late = of(in_phase("post-copy"))
    assert actions.why_not(BY_NAME["bandwidth"], late) is None
    assert actions.why_not(BY_NAME["downtime"], late) == "already in post-copy"


def test_only_what_is_broken_or_a_whole_host_is_resumed() -> None:
    refused = actions.why_not(BY_NAME["resume"], of(MOVE))
    assert refused == "a migration can be resumed only if the stream of its post-copy broke"
    assert actions.why_not(BY_NAME["resume"], of(BROKEN)) is None
    assert actions.why_not(BY_NAME["resume"], of(DRAIN)) is None


def test_the_cost_is_told_in_numbers_or_as_unknown() -> None:
    known, unknown = of(MOVE, done=0.72, remaining=3 * GIB), of(MOVE)
    cancel, switch = BY_NAME["cancel"].costs, BY_NAME["postcopy"].costs
    assert cancel(known, {}) == "72% is done and will be discarded; busy stays on the source"
    assert (cancel(unknown, {}) or "").startswith("an unknown share is done")
    assert (switch(known, {}) or "").startswith("3.0 GiB will be fetched over the network")
    assert (cancel(of(DRAIN, done=0.5), {}) or "").startswith("50% is done; running migrations")
