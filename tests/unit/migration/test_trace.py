"""Traces: what is written can be read, and what is none is told with its line."""

import json
from pathlib import Path

import pytest

from tests.support.builders import sample
from vmckpt.errors import BadInput
from vmckpt.migration import trace
from vmckpt.migration.forecast.dirty_curve import DirtyCurve
from vmckpt.migration.trace import Header, Tracer
from vmckpt.model.events import Decided, Estimate, Sampled
from vmckpt.model.migration import Decision, Mode, Outcome
from vmckpt.units import GIB, Bytes, Seconds

HEADER = Header(
    guest="web1", memory=Bytes(GIB), policy="balanced", mode=Mode.HYBRID, post_copy=True,
    curve=DirtyCurve(((1.0, 5e6),), GIB),
)  # fmt: skip
DECISION = Decision(at=Seconds(12.0), action="abort", reason="late", rule="r", numbers={"n": 1})


def written(path: Path) -> Path:
    tracer = Tracer(path)
    tracer.begin(HEADER, Seconds(10.0))
    guess = Estimate(low=None, high=None, converging=None)
    tracer.take(Sampled(sample=sample(11.0), estimate=guess, done=0.1))
    tracer.take(Decided(decision=DECISION))
    tracer.end(Outcome.COMPLETED)
    tracer.close()
    return path


def test_what_was_written_is_read_again_from_the_beginning_of_the_migration(tmp_path: Path) -> None:
    read = trace.read(written(tmp_path / "t.jsonl"))

    assert (read.header, read.outcome) == (HEADER, "completed")
    assert [one.at for one in read.samples] == [1.0]
    assert [(one.at, one.rule, one.numbers) for one in read.decisions] == [(2.0, "r", {"n": 1})]


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="already exists"):
        Tracer(written(tmp_path / "t.jsonl"))


def test_no_file_is_made_before_something_happens(tmp_path: Path) -> None:
    Tracer(tmp_path / "t.jsonl").close()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"decision": {"at_ms": 1}}', '{"sample": {}}', '{"trace": "v9"}']
)
def test_what_is_no_trace_is_told_with_its_line(tmp_path: Path, line: str) -> None:
    path = written(tmp_path / "t.jsonl")
    path.write_text(path.read_text() + line + "\n")

    with pytest.raises(BadInput, match=r"t\.jsonl:5: not a valid line of a trace"):
        trace.read(path)


def test_a_trace_that_breaks_off_can_be_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl")
    path.write_text("\n".join(path.read_text().splitlines()[:2]) + "\n")

    assert trace.read(path).outcome is None
    assert json.loads(path.read_text().splitlines()[0])["trace"] == "vmckpt/v1"
