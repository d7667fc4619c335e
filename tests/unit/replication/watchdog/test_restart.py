"""An agent whose watchdog has not looked starts another one, and does not wait for that."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.replicas import until
from vmckpt.errors import HypervisorError
from vmckpt.lease.clock import boottime
from vmckpt.replication.watchdog.restart import WatchdogRestart


def page(ago: float) -> Any:
    """That of a watchdog which looked so many seconds ago."""
    return SimpleNamespace(guarded=boottime() - ago)


def ended(restart: WatchdogRestart) -> bool:
    return restart._thread is not None and not restart._thread.is_alive()


def test_one_that_looks_is_left_alone() -> None:
    begun: list[int] = []
    restart = WatchdogRestart(page(0.0), lambda: begun.append(1))
    restart.look()
    assert (begun, restart._thread) == ([], None)


def test_one_that_does_not_is_started_again_by_one_thread_at_a_time() -> None:
    gate, begun = threading.Event(), list[int]()

    def begin() -> None:
        begun.append(1)
        gate.wait(5.0)

    restart = WatchdogRestart(page(2.0), begin)
    for _ in range(3):
        restart.look()
    until(lambda: begun == [1])
    gate.set()
    until(lambda: ended(restart))
    restart.look()
    until(lambda: begun == [1, 1])


@pytest.mark.parametrize("error", [HypervisorError("no", host="alpha"), OSError("no processes")])
def test_the_next_look_tries_again_what_has_failed(error: Exception) -> None:
    tried: list[int] = []

    def begin() -> None:
        tried.append(1)
        raise error

    restart = WatchdogRestart(page(2.0), begin)
    for count in (1, 2):
        restart.look()
        until(lambda: ended(restart))
        assert len(tried) == count
