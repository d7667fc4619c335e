"""What a recorder gets, and a wait until it is written."""

import time
from collections.abc import Callable

from tests.support.builders import sample
from vmckpt.journal.records import NewOperation
from vmckpt.model.events import Estimate, Sampled

WEB1 = NewOperation(kind="migrate", guest="web1", source="alpha", target="beta")
UNKNOWN = Estimate(low=None, high=None, converging=None)


def sampled(at: float, done: float = 0.5) -> Sampled:
    return Sampled(sample=sample(at), estimate=UNKNOWN, done=done)


def until(condition: Callable[[], object], limit: float = 10.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
