"""A flood of packets in one epoch, with the filters of a real QEMU that has no guest."""

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.guestless import Qmp, qemu
from tests.support.staging import in_memory
from vmckpt.replication.primary import network_buffer as network_buffer_module
from vmckpt.replication.primary.network_buffer import EARLY, MOST, Buffers
from vmckpt.replication.primary.network_filters import LONGEST
from vmckpt.units import Seconds

FLOOD = 50_000
_LENGTH = struct.Struct(">I")
SHORT = Seconds(2.0)
"""An interval of QEMU's timer that a test can wait for."""
_NUMBER = struct.Struct(">52xQ")
"""A packet of 60 bytes."""


class Wire:
    """What a guest's card would send goes in at one end, and what gets out comes at the other."""

    def __init__(self, guest: socket.socket, outside: socket.socket) -> None:
        self._guest, self._outside = guest, outside
        self.came: list[int] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, first: int, count: int) -> None:
        packets = (_NUMBER.pack(number) for number in range(first, first + count))
        self._guest.sendall(b"".join(_LENGTH.pack(_NUMBER.size) + one for one in packets))

    def _run(self) -> None:
        left = b""
        size = _LENGTH.size + _NUMBER.size
        while more := self._outside.recv(1 << 18):
            left += more
            whole = len(left) // size * size
            for at in range(0, whole, size):
                self.came += _NUMBER.unpack_from(left, at + _LENGTH.size)
            left = left[whole:]

    def close(self) -> None:
        self._outside.shutdown(socket.SHUT_RDWR)
        self._thread.join()


@pytest.fixture
def folder() -> Iterator[Path]:
    with in_memory() as made:
        yield made


def made_for(qmp: Qmp, folder: Path, interval: Seconds = LONGEST) -> Buffers:
    return Buffers(qmp, ["net0"], folder, (os.getuid(), os.getgid()), interval=interval)


@pytest.fixture
def wired(folder: Path) -> Iterator[tuple[Wire, Qmp]]:
    with ExitStack() as stack:
        guest, inside = (stack.enter_context(one) for one in socket.socketpair())
        outside, wire = (stack.enter_context(one) for one in socket.socketpair())
        qmp = stack.enter_context(
            qemu(
                "-netdev", f"socket,id=guest,fd={inside.fileno()}",
                "-netdev", "hubport,id=left,hubid=0,netdev=guest",
                "-netdev", f"socket,id=hostnet0,fd={wire.fileno()}",
                "-netdev", "hubport,id=right,hubid=0,netdev=hostnet0",
                files=[inside.fileno(), wire.fileno()],
            )
        )  # fmt: skip
        inside.close()
        wire.close()
        made = Wire(guest, outside)
        stack.callback(made.close)
        yield made, qmp


@pytest.fixture
def rig(wired: tuple[Wire, Qmp], folder: Path) -> tuple[Wire, Buffers]:
    return wired[0], made_for(wired[1], folder)


@pytest.fixture
def short(wired: tuple[Wire, Qmp], folder: Path) -> tuple[Wire, Buffers]:
    return wired[0], made_for(wired[1], folder, SHORT)


def collected(buffers: Buffers, count: int) -> None:
    give_up = time.monotonic() + 30.0
    while buffers.collected() < count:
        assert time.monotonic() < give_up
        time.sleep(0.005)


def out(wire: Wire, count: int) -> list[int]:
    """What has got out, once so many have."""
    give_up = time.monotonic() + 30.0
    while len(wire.came) < count:
        assert time.monotonic() < give_up
        time.sleep(0.005)
    time.sleep(0.1)
    return wire.came


def test_of_a_flood_in_one_epoch_qemu_keeps_what_it_can_and_the_rest_is_counted(
    rig: tuple[Wire, Buffers],
) -> None:
    wire, buffers = rig
    buffers.add()
    wire.send(0, FLOOD)
    collected(buffers, EARLY)  # an epoch would end here
    collected(buffers, FLOOD)
    assert buffers.close_epoch() == FLOOD
    time.sleep(0.1)
    assert wire.came == []
    buffers.release()

    assert out(wire, MOST) == list(range(MOST))
    assert buffers.lost == FLOOD - MOST
    wire.send(FLOOD, 5)
    collected(buffers, 5)
    assert buffers.close_epoch() == 5
    buffers.release()
    assert out(wire, MOST + 5)[MOST:] == list(range(FLOOD, FLOOD + 5))
    assert buffers.lost == FLOOD - MOST


def test_epochs_that_pile_up_lose_what_is_beyond_one_buffer_in_all(
    rig: tuple[Wire, Buffers],
) -> None:
    wire, buffers = rig
    buffers.add()
    for first in range(0, 12_000, 4000):
        wire.send(first, 4000)
        collected(buffers, 4000)
        buffers.close_epoch()
    buffers.release()

    assert out(wire, MOST) == list(range(MOST))
    assert buffers.lost == 12_000 - MOST


def test_filters_that_go_let_out_what_they_have_and_count_the_rest(
    rig: tuple[Wire, Buffers],
) -> None:
    wire, buffers = rig
    buffers.add()
    wire.send(0, 3000)
    collected(buffers, 3000)
    buffers.close_epoch()
    wire.send(3000, 9000)
    collected(buffers, 9000)
    buffers.remove()

    assert out(wire, MOST) == list(range(MOST))
    assert buffers.lost == 2000
    wire.send(20_000, 1)
    assert out(wire, MOST + 1)[-1] == 20_000


def a_closed_and_an_open_epoch(wire: Wire, buffers: Buffers) -> None:
    """Of five packets and of three; nothing is released."""
    buffers.add()
    wire.send(0, 5)
    collected(buffers, 5)
    buffers.close_epoch()
    wire.send(5, 3)
    collected(buffers, 3)


def test_output_that_waits_for_several_intervals_of_qemu_s_timer_waits_on(
    short: tuple[Wire, Buffers],
) -> None:
    wire, buffers = short
    a_closed_and_an_open_epoch(wire, buffers)
    over = time.monotonic() + 4 * SHORT
    while time.monotonic() < over:
        buffers.keep()
        time.sleep(0.05)
    wire.send(8, 1)
    collected(buffers, 4)
    time.sleep(0.1)
    assert wire.came == []
    buffers.release()
    assert out(wire, 5) == list(range(5))
    buffers.close_epoch()
    buffers.release()
    assert out(wire, 9) == list(range(9))
    buffers.remove()
    assert not buffers.complete()


def test_what_the_timer_lets_go_when_no_agent_is_left_never_gets_out(
    wired: tuple[Wire, Qmp], short: tuple[Wire, Buffers], folder: Path
) -> None:
    wire, buffers = short
    a_closed_and_an_open_epoch(wire, buffers)
    over = time.monotonic() + 3.5 * SHORT  # the second goes from one buffer to the other first
    while time.monotonic() < over:
        wire.send(100, 1)
        time.sleep(0.1)
    assert wire.came == []

    new = made_for(wired[1], folder, SHORT)
    new.attach()
    new.close_epoch()
    new.release()
    began = len(wire.came)  # what came since the timer fired last
    wire.send(200, 1)
    collected(new, 1)
    new.close_epoch()
    new.release()
    assert out(wire, began + 1)[-1] == 200
    assert set(wire.came) <= {100, 200}


def test_without_a_sink_and_without_an_agent_the_timer_would_let_it_out(
    short: tuple[Wire, Buffers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other tests are about, seen in this QEMU."""
    monkeypatch.setattr(network_buffer_module, "_can_discard", lambda _: False)
    wire, buffers = short
    buffers.add()
    wire.send(0, 5)
    collected(buffers, 5)
    buffers.close_epoch()
    assert out(wire, 5) == list(range(5))


def test_an_epoch_whose_output_the_timer_mixed_with_the_next_is_not_released(
    short: tuple[Wire, Buffers],
) -> None:
    wire, buffers = short
    a_closed_and_an_open_epoch(wire, buffers)
    time.sleep(1.2 * SHORT)
    buffers.release()
    time.sleep(0.1)
    assert wire.came == []
