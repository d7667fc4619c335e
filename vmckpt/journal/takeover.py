"""Taking over an operation whose controller is gone, and recording it from then on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vmckpt.journal import recorder
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import Operation

if TYPE_CHECKING:
    from vmckpt.journal.store import Journal


@contextmanager
def taken_over(
    journal: "Journal", operation: Operation, warn: Callable[[str], None]
) -> Iterator[Recorder]:
    """This process is the operation's controller from now on.

    Raises GuestBusy if somebody else is at it.
    """
    fence = journal.take_over(operation)
    with recorder.resumed(operation, fence, warn, place=journal.place) as kept:
        if operation.controller.entrusted:  # its agents go on with it, whatever fails here
            kept.entrust(operation.controller.host)
        yield kept
