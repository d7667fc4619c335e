"""Pages of another process's memory."""

import numpy as np
import pytest

from tests.support.written_process import WrittenProcess
from vmckpt.capture.memory.process_memory import ProcessMemory


def test_runs_are_read_in_their_order() -> None:
    with WrittenProcess(4096) as process:
        process.write([5, 6, 4095])
        process.write([6])
        memory = ProcessMemory(process.held, [process.range])
        pages = memory.read(0, np.array([[4095, 4096], [4, 7]]))
        assert pages[:, 0].tolist() == [1, 0, 1, 2]
        assert pages.shape == (4, 512)
        many = memory.read(0, np.stack((np.arange(4096), np.arange(1, 4097)), axis=1))
        assert np.flatnonzero(many.any(axis=1)).tolist() == [5, 6, 4095]
        assert memory.read(0, np.zeros((0, 2), dtype=np.intp)).shape == (0, 512)


def test_room_that_is_given_is_used_if_it_suffices() -> None:
    with WrittenProcess(16) as process:
        memory = ProcessMemory(process.held, [process.range])
        room = np.zeros((4, 512), dtype=np.uint64)
        assert np.shares_memory(memory.read(0, np.array([[0, 3]]), room), room)
        assert not np.shares_memory(memory.read(0, np.array([[0, 5]]), room), room)


def test_pages_without_data_are_told() -> None:
    with WrittenProcess(600) as process:
        process.write([3, 599])
        memory = ProcessMemory(process.held, [process.range])
        assert np.flatnonzero(memory.populated(0)).tolist() == [3, 599]


def test_memory_that_is_gone_is_an_error() -> None:
    with WrittenProcess(16) as process:
        memory = ProcessMemory(process.held, [process.range])
        with pytest.raises(OSError, match="cannot read QEMU's memory"):
            memory.read(0, np.array([[1 << 20, (1 << 20) + 1]]))
        process.kill()
        with pytest.raises(OSError, match="No such process"):
            memory.read(0, np.array([[0, 1]]))
