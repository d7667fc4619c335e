"""Operations in a journal of either kind, and what they tell."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from vmckpt.journal import location as locations
from vmckpt.journal.records import Batch, NewOperation
from vmckpt.journal.serialization import as_record
from vmckpt.journal.store import Journal
from vmckpt.model.events import Decided, PhaseChanged
from vmckpt.model.migration import Decision, JobPhase
from vmckpt.units import Seconds

WEB1 = NewOperation(kind="migrate", guest="web1", source="alpha", target="beta")
WEB2 = NewOperation(kind="migrate", guest="web2", source="alpha", target="gamma")


@pytest.fixture
def journal(place: Path | str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    monkeypatch.setenv(locations.VARIABLE, str(place))
    with Journal(place) as made:
        yield made


def tell(journal: Journal, id_: str, at: float = 0.0) -> None:
    decision = Decision(at=Seconds(at), action="wait", reason="it gets less", rule="grow")
    told = [PhaseChanged(phase=JobPhase.PRE_COPY), Decided(decision=decision)]
    batch = Batch(events=[as_record(one, Seconds(0.0), Seconds(at)) for one in told])
    journal.write(id_, batch)
