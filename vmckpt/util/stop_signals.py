"""A signal that sets an event which other code waits for.

A handler must not set the event itself. Python runs it in the main thread between any two
instructions. If these are inside `Event.wait`, whose lock is not reentrant, the handler waits for
its own thread.
"""

import queue
import signal
import threading
from collections.abc import Iterable


def set_on(numbers: Iterable[signal.Signals], event: threading.Event) -> None:
    """Set `event` on any of these signals, from now on.

    Python may run the handler only after a wait of the main thread has ended, so that thread waits
    for the event with a time limit, again and again.
    """
    # The only kind of queue to which a handler may add.
    arrived: queue.SimpleQueue[None] = queue.SimpleQueue()

    def pass_on() -> None:
        arrived.get()
        event.set()

    threading.Thread(target=pass_on, name="stop signals", daemon=True).start()
    for number in numbers:
        signal.signal(number, lambda *_: arrived.put(None))
