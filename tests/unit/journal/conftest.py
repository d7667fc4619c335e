"""A journal of either kind, with a clock that is set by hand."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.journals import Clock
from vmckpt.journal.store import Journal


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def journal(place: Path | str, clock: Clock) -> Iterator[Journal]:
    with Journal(place, clock=clock) as made:
        yield made
