"""A lane: one daemon thread that does blocking calls one after the other for an event loop.

Daemon threads, because a libvirt call that never returns must not keep the process from ending;
an executor's threads are joined at exit.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Lane:
    """Runs callables in the order given, in a thread that starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call` in the lane. Cancelling the wait does not stop the call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            # Whoever waits may have gone, and its loop with it; the result then has no taker.
            with contextlib.suppress(RuntimeError):
                if future.cancelled():
                    return
                try:
                    result = call()
                except BaseException as exc:  # noqa: BLE001 - handed to whoever waits
                    loop.call_soon_threadsafe(_fail, future, exc)
                else:
                    loop.call_soon_threadsafe(_finish, future, result)

        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._work.put(work)
        return await future

    def close(self) -> None:
        """Let the thread end after the calls already given."""
        self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _finish(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[T]", error: BaseException) -> None:
    if not future.done():
        # A future takes no StopIteration, and who waits for it would wait for ever.
        stopped = isinstance(error, StopIteration)
        future.set_exception(ValueError("no such thing") if stopped else error)
