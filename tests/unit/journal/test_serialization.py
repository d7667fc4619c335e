"""Events and samples become rows of the journal, and samples come back as they were."""

from dataclasses import dataclass

from tests.support.builders import sample
from vmckpt.journal.records import StoredSample
from vmckpt.journal.serialization import as_record, as_sampled
from vmckpt.model.events import Checked, Decided, Estimate, PhaseChanged, Sampled
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.migration import Decision, JobPhase
from vmckpt.units import MIB, Bytes, Seconds


def test_a_decision_is_stored_with_its_own_time_counted_from_the_beginning() -> None:
    decision = Decision(at=Seconds(107.5), action="abort", reason="late", numbers={"s": 5})
    record = as_record(Decided(decision=decision), Seconds(100.0), Seconds(109.0))

    assert (record.kind, record.at) == ("decided", 7.5)
    assert record.values["numbers"] == {"s": 5}
    assert (record.values["action"], record.values["reason"]) == ("abort", "late")


def test_a_phase_has_the_time_at_which_it_was_told() -> None:
    record = as_record(PhaseChanged(phase=JobPhase.SETUP), Seconds(100.0), Seconds(102.0))

    assert (record.kind, record.at, record.values) == ("phase-changed", 2.0, {"phase": "setup"})


def test_findings_are_stored_whole() -> None:
    finding = Finding(code="c", severity=Severity.WARNING, where="beta", text="t")
    record = as_record(Checked(findings=(finding,)), Seconds(0.0), Seconds(0.0))

    stored = {k: v for k, v in finding.as_json().items() if k != "hint"}
    assert record.values == {"findings": [stored]}


def test_a_kind_of_event_that_is_yet_to_come_is_stored_field_by_field() -> None:
    @dataclass(frozen=True)
    class PostCopyBroke:
        lasted: Seconds
        left: Bytes
        limits: tuple[float, ...]

    event = PostCopyBroke(lasted=Seconds(0.25), left=Bytes(7), limits=(1.0, float("inf")))
    record = as_record(event, Seconds(0.0), Seconds(1.0))

    assert record.kind == "post-copy-broke"
    assert record.values["left"] == 7
    assert record.values["limits"] == [1.0, None]


def test_a_sample_comes_back_as_it_was_told() -> None:
    event = Sampled(
        sample=sample(12.5, dirty_rate=3 * MIB, expected_downtime=0.123),
        estimate=Estimate(low=Seconds(1.5), high=Seconds(4.0), converging=True),
        done=0.75,
    )
    record = as_record(event, Seconds(10.0), Seconds(99.0))
    stored = StoredSample(seq=1, at=record.at, values=record.values)

    assert stored.as_json()["expected_downtime_ms"] == 123.0
    assert as_sampled(stored) == Sampled(
        sample=sample(2.5, dirty_rate=3 * MIB, expected_downtime=0.123),
        estimate=event.estimate,
        done=0.75,
    )
