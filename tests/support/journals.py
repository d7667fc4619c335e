"""A migration that is noted in a journal, and a clock for it."""

from vmckpt.journal.records import NewOperation, Record
from vmckpt.units import Seconds

WEB1 = NewOperation(kind="migrate", guest="web1", guest_uuid="u-1", source="alpha", target="beta")


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def sampled(*times: float) -> list[Record]:
    return [Record(kind="sampled", at=Seconds(at), values={"done": 0.5}) for at in times]
