"""Jobs in a journal, and the commands that look at them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.builders import sample
from vmckpt.cli import app as cli_app
from vmckpt.journal import controller_identity
from vmckpt.journal.records import Batch, NewOperation
from vmckpt.journal.serialization import as_record
from vmckpt.journal.store import Journal
from vmckpt.model.events import Decided, Estimate, PhaseChanged, Sampled
from vmckpt.model.migration import Decision, JobPhase
from vmckpt.units import Seconds

WEB1 = NewOperation(kind="migrate", guest="web1", source="alpha", target="beta")
app = cli_app.app


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path))
    with Journal() as made:
        yield made


def sampled(at: float, done: float = 0.25) -> Sampled:
    estimate = Estimate(low=Seconds(3.0), high=Seconds(5.0), converging=True)
    return Sampled(sample=sample(at), estimate=estimate, done=done)


def filled(journal: Journal) -> str:
    """A job that runs, with something of everything."""
    id_ = journal.begin(WEB1, asked_by="eve@desk")
    decision = Decision(at=Seconds(2.0), action="raise-downtime", reason="it stalls")
    told = [PhaseChanged(phase=JobPhase.PRE_COPY), Decided(decision=decision)]
    journal.write(
        id_,
        Batch(
            changes={"phase": "pre-copy"},
            events=[as_record(one, Seconds(0.0), Seconds(1.0)) for one in told],
            samples=[as_record(sampled(at), Seconds(0.0), Seconds(0.0)) for at in (1.0, 1.2, 2.4)],
        ),
    )
    journal.add_forecast(id_, {"total_ms": 4000})
    return id_


def dead(journal: Journal) -> str:
    """A job whose controller has ended."""
    controller = replace(controller_identity.this_process(), started=1)
    return journal.begin(WEB1, controller=controller)


def ran(*args: str) -> str:
    """What a command says on stdout; its error is raised."""
    result = CliRunner().invoke(app, args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout
