"""Ctrl-C and SIGTERM, for commands that must end in order."""

import asyncio
import signal

from vmckpt.cli import output

_STILL = "still stopping; it cannot be left half done"


def stop_on_signals(
    first: str, second: str = _STILL, again: asyncio.Event | None = None
) -> asyncio.Event:
    """Set by Ctrl-C and SIGTERM, which say `first`; the next ones say `second`, and set `again`."""
    stop = asyncio.Event()

    def cancel() -> None:
        if not stop.is_set():
            output.say(first)
            stop.set()
        elif again is None or again.is_set():
            output.say(_STILL)
        else:
            output.say(second)
            again.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, cancel)
    return stop
