"""A moment in which a loop does nothing, for somebody beside it."""

import threading
import time
from collections.abc import Iterator

import pytest

from vmckpt.replication.test_failover.pause import LoopPause, Missed
from vmckpt.units import Seconds

SHORT = Seconds(0.05)


class Loop:
    """Counts its turns until it is ended."""

    def __init__(self, still: LoopPause) -> None:
        self.turns = 0
        self.over = False
        self.still = still
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while not self.over:
            self.turns += 1
            self.still.turn()
            time.sleep(0.0005)

    def end(self) -> None:
        self.over = True
        self.thread.join()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop(LoopPause(longest=Seconds(0.2)))
    yield made
    made.end()


def goes_on(loop: Loop) -> bool:
    before = loop.turns
    give_up = time.monotonic() + 5.0
    while loop.turns <= before + 2:
        if time.monotonic() > give_up:
            return False
        time.sleep(0.001)
    return True


def test_the_loop_holds_still_as_long_as_it_is_held(loop: Loop) -> None:
    for _ in range(20):
        with loop.still.held():
            before = loop.turns
            time.sleep(0.005)
            assert loop.turns == before
        assert goes_on(loop)


def test_the_loop_does_not_wait_for_ever_and_who_held_it_is_told(loop: Loop) -> None:
    told = r"paused updates of the standby for more than 0\.2 s"
    with pytest.raises(Missed, match=told), loop.still.held():
        assert goes_on(loop)
    with loop.still.held():
        pass


def test_what_goes_wrong_meanwhile_lets_the_loop_go_on(loop: Loop) -> None:
    with pytest.raises(ZeroDivisionError), loop.still.held():
        raise ZeroDivisionError
    assert goes_on(loop)


def test_a_loop_that_does_not_come_is_not_waited_for_for_ever() -> None:
    still = LoopPause()
    with pytest.raises(Missed), still.held(SHORT):
        pytest.fail("nobody holds still")
    # What nobody wants any more holds nobody.
    still.turn()


def test_who_waits_is_told_at_once_that_the_loop_has_ended() -> None:
    still = LoopPause()
    ender = threading.Timer(0.02, still.close)
    ender.start()
    began = time.monotonic()
    with pytest.raises(Missed, match="protection is ending"), still.held():
        pytest.fail("nobody holds still")
    assert time.monotonic() - began < 5.0
    ender.join()
