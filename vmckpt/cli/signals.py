"""Ctrl-C and SIGTERM, for commands that must end in order."""

import asyncio
import signal

from vmckpt.cli import output


def stop_on_signals(first: str) -> asyncio.Event:
    """Set by Ctrl-C and SIGTERM, which say `first`."""
    stop = asyncio.Event()

    def cancel() -> None:
        if not stop.is_set():
            output.say(first)
            stop.set()
        else:
            output.say("still stopping; it cannot be left half done")

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, cancel)
    return stop
