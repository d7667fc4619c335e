"""Epochs by dirty log in a protection: begun, left, failed, and left behind; under KVM for real."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from tests.unit import replicas
from tests.unit.test_replicate_dirtylog_kvm import APART, WHY_NOT, Rig, _is_as_before
from vmckpt.agent import finding
from vmckpt.errors import CaptureFailed
from vmckpt.hypervisor.monitor import Monitor
from vmckpt.replicate import bydirtylog
from vmckpt.replicate.bydirtylog import ByDirtyLog, Gate
from vmckpt.replicate.capture import Capturer
from vmckpt.replicate.choosing import Finder
from vmckpt.replicate.dirtylog import DirtyLog
from vmckpt.replicate.finder import CompareFinder
from vmckpt.replicate.scratch import PAGES, Scratch

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


class Way(Rig):
    """A rig whose epochs are taken as a protection takes them."""

    def __init__(self, guest: Scratch, stack: ExitStack, folder: Path) -> None:
        super().__init__(guest, stack)
        self.folder = folder
        finder = stack.enter_context(CompareFinder([guest.memory], [self.last], most=2 * PAGES))
        self.gate = Gate(self.held)
        compare = Capturer(
            guest, self.undo, finder=finder, output=self.held, logs=[self.disk],
            still=self.held.still.append,
        )  # fmt: skip
        self.made: list[DirtyLog] = []
        self.way = ByDirtyLog(guest, folder, self._make, compare=compare, gate=self.gate)

    def _make(self) -> DirtyLog:
        made = DirtyLog(
            self.guest, self.undo, files=self.guest.files, last=[self.last], most=2 * PAGES,
            output=self.gate, logs=[self.disk], still=self.held.still.append,
        )  # fmt: skip
        self.made.append(made)
        return made


@pytest.fixture
def way(tmp_path: Path) -> Iterator[Way]:
    with ExitStack() as stack:
        yield Way(stack.enter_context(Scratch()), stack, tmp_path)


def _epochs(way: Way, count: int) -> None:
    for _ in range(count):
        time.sleep(APART)
        way.take_over(way.way.take())
        assert way.equal()


def test_it_is_begun_and_left_and_begun_again(way: Way) -> None:
    for _ in range(2):
        (changed,) = way.way.begin()
        way.last.pages[changed.numbers] = changed.pages
        assert way.held.memory is None  # no epoch of output ended there
        assert way.way.begin() == ()
        _epochs(way, 5)
        way.way.end()
        way.way.end()
        assert list(way.folder.iterdir()) == []
        _is_as_before(way)
        way.held.memory = None
    assert len(way.made) == 2


def test_where_it_is_not_on_memory_is_compared(way: Way) -> None:
    _epochs(way, 2)
    assert not way.made


def test_one_that_broke_is_put_back_and_not_used_again(way: Way) -> None:
    way.way.begin()
    _socket(way).shutdown(socket.SHUT_RDWR)
    with pytest.raises(CaptureFailed):
        way.way.take()
    assert "broke off" in str(bydirtylog.failed(way.folder))
    bydirtylog.leave(way.guest, way.folder)
    _is_as_before(way)
    session = replicas.session()
    choice = finding.choose(session, way.folder, cast("Monitor", way.guest), os.getpid())
    assert choice.finder is Finder.COMPARE
    assert "failed with this guest" in choice.why


def test_what_a_dead_agent_left_is_left_by_the_next(way: Way) -> None:
    way.way.begin()
    way.take_over(way.way.take(goes_on=False))
    _socket(way).close()
    bydirtylog.leave(way.guest, way.folder)
    bydirtylog.leave(way.guest, way.folder)
    _is_as_before(way)


def test_nothing_is_left_where_nothing_was_begun(way: Way) -> None:
    bydirtylog.leave(way.guest, way.folder)
    assert way.guest.goes_on()
    assert bydirtylog.failed(way.folder) is None


def _socket(way: Way) -> socket.socket:
    made = way.made[-1]._socket
    assert made is not None
    return made
