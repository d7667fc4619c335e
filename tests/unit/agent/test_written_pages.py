"""Counting the pages that a process writes."""

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from tests.support.written_process import WrittenProcess
from vmckpt.agent import written_pages
from vmckpt.agent.orders import CountOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.capture.memory import ram_blocks
from vmckpt.capture.memory.write_tracking import WriteTracking
from vmckpt.hypervisor.qemu_process import identity


def counted(times: Sequence[float], stop: threading.Event) -> list[tuple[float, int]]:
    """The counts of a process that writes 40 pages again and again, and a new page each 10 ms."""
    with WrittenProcess(4096) as process:
        over = threading.Event()

        def write() -> None:
            for number in range(1000):
                process.write([*range(100, 140), 1000 + number])
                if over.wait(0.01):
                    return

        writer = threading.Thread(target=write)
        with WriteTracking(process.held, [process.range]) as writes:
            writes.collect_all()
            writer.start()
            try:
                return list(written_pages._points(writes, times, stop))
            finally:
                over.set()
                writer.join()


def test_each_count_has_all_pages_since_the_beginning_once() -> None:
    found = counted((0.1, 0.25, 0.5), threading.Event())

    assert [round(at, 1) for at, _ in found] == pytest.approx([0.1, 0.2, 0.5], abs=0.2)
    pages = [size >> 12 for _, size in found]
    assert pages == sorted(pages)
    assert 40 < pages[0] <= 40 + 100 * found[0][0] + 2
    assert 45 < pages[-1] <= 40 + 100 * found[-1][0] + 2


def test_a_count_that_is_stopped_counts_once_more_and_takes_a_third_of_a_second() -> None:
    stop = threading.Event()
    stop.set()
    began = time.monotonic()
    found = counted((0.1, 0.25, 0.5, 60.0), stop)

    assert len(found) == 3
    assert found[-1][0] == pytest.approx(0.3, abs=0.15)
    assert time.monotonic() - began < 10


def test_a_long_count_ends_as_soon_as_it_is_stopped() -> None:
    stop = threading.Event()
    timer = threading.Timer(0.6, stop.set)
    timer.start()
    found = counted((0.1, 60.0), stop)

    assert len(found) == 2
    assert found[-1][0] < 10


def test_the_guests_own_process_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its other blocks, too."""
    seen: list[object] = []

    class Monitor:
        name = "web1"

        def __init__(self, guest: str, *, host: str, uri: str) -> None:
            seen.append((guest, host, uri))

        def __enter__(self) -> "Monitor":
            return self

        def __exit__(self, *_: object) -> None:
            seen.append("closed")

    with WrittenProcess(64) as process:
        block = SimpleNamespace(range=process.range)
        blocks = SimpleNamespace(guest=(block,), private=())
        monkeypatch.setattr(written_pages, "QmpMonitor", Monitor)
        monkeypatch.setattr(identity, "require", lambda *_: process.held)
        monkeypatch.setattr(ram_blocks, "find", lambda *_: blocks)
        order = CountOrder(guest="u-1", uri="qemu:///x", host="alpha", times=(0.01,))
        channel = cast("ControllerChannel", SimpleNamespace(stop=threading.Event()))

        told = written_pages.count(order, channel)

    assert seen == [("u-1", "alpha", "qemu:///x"), "closed"]
    assert [size for _, size in told["points"]] == [0]
