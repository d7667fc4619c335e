"""Signals that set a `threading.Event`, for which other code is waiting.

The signal handler must not set the event itself. Python runs the handler in the main thread,
between any two instructions. If the main thread is inside `Event.wait`, whose lock is not
reentrant, the handler would wait for its own thread.
"""

import queue
import signal
import threading
from collections.abc import Iterable


def set_on(numbers: Iterable[signal.Signals], event: threading.Event) -> None:
    """Install signal handlers: from now on, each of these signals sets `event`.

    Python may delay the handler until a wait of the main thread has returned. Therefore the main
    thread must wait for the event in a loop, with a time limit.
    """
    # SimpleQueue is the only kind of queue to which a signal handler may add items.
    arrived: queue.SimpleQueue[None] = queue.SimpleQueue()

    def pass_on() -> None:
        arrived.get()
        event.set()

    threading.Thread(target=pass_on, name="stop signals", daemon=True).start()
    for number in numbers:
        signal.signal(number, lambda *_: arrived.put(None))
