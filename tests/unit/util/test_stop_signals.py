"""A signal sets an event, whatever the main thread is about to do with it."""

import subprocess
import sys

PROGRAM = """
import signal, threading
from vmckpt.util import stop_signals
event = threading.Event()
stop_signals.set_on([signal.SIGTERM], event)
with event._cond:  # as for an instant in each wait
    signal.raise_signal(signal.SIGTERM)
print(event.wait(10))
"""


def test_a_signal_during_a_wait_sets_its_event() -> None:
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True\n"
