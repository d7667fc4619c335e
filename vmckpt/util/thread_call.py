"""Run a function in a thread of its own while the caller does something else."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start(work: Callable[[], T], *, name: str) -> Future[T]:
    """Start `work` in a thread with this name. Returns a future for the result.

    The process can exit while the thread is running.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as exc:  # noqa: BLE001 - raised in the thread that waits
            future.set_exception(exc)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
