"""What a source's agent says becomes samples of a migration."""

import pytest

from vmckpt.migration.epochs.samples import Sampler
from vmckpt.model.migration import JobPhase
from vmckpt.units import MIB, Bytes, Seconds

COPYING = {"phase": "copying", "sent": 10 * MIB, "pages_left": 512}
FOLLOWS = {
    "phase": "protecting", "sent": 30 * MIB, "epoch": 4, "interval_s": 0.5, "wished": False,
    "last": {"pages": 256, "bytes": 70_000},
}  # fmt: skip


def test_what_an_agent_says_becomes_samples() -> None:
    sampler = Sampler(Bytes(100 * MIB))
    assert sampler.take(Seconds(1.0), {"phase": "connecting"}, None) is None
    assert sampler.setup(Seconds(0.0)) is None
    first = sampler.take(Seconds(2.0), {"phase": "copying", "sent": 0}, None)
    assert first is not None
    assert (first.iteration, first.remaining, first.bandwidth) == (1, 100 * MIB, 0)
    second = sampler.take(Seconds(4.0), COPYING, None)
    assert second is not None
    assert (second.remaining, second.bandwidth) == (2 * MIB, 5 * MIB)
    assert second.dirty_rate is None
    third = sampler.take(Seconds(5.0), FOLLOWS, Seconds(0.2))
    assert third is not None
    assert (third.iteration, third.remaining, third.dirty_rate) == (2, 70_000, 2 * MIB)
    assert (third.phase, third.expected_downtime) == (JobPhase.PRE_COPY, 0.2)
    last = sampler.take(Seconds(6.0), {**FOLLOWS, "wished": True, "epoch": 5}, Seconds(0.2))
    assert last is not None
    assert last.phase is JobPhase.SWITCHOVER
    assert (sampler.epochs, sampler.sent) == (5, 30 * MIB)
    assert sampler.setup(Seconds(0.5)) == pytest.approx(1.5)


def test_an_agent_that_was_started_anew_does_not_take_back_what_was_sent() -> None:
    sampler = Sampler(Bytes(100 * MIB))
    sampler.take(Seconds(1.0), FOLLOWS, None)
    again = sampler.take(Seconds(2.0), {**FOLLOWS, "sent": 100}, None)
    assert again is not None
    assert (again.transferred, again.bandwidth) == (30 * MIB, 0)
