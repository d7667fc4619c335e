"""A userfaultfd for the memory of another process."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.written_process import WrittenProcess
from vmckpt.capture.memory import write_tracking
from vmckpt.hypervisor.qemu_process import injection, userfaultfd


@pytest.fixture
def process() -> Iterator[WrittenProcess]:
    with WrittenProcess() as made:
        yield made


def left_by_another(process: WrittenProcess) -> int:
    """As by an agent that was killed after the call. Its number in the process."""
    return injection.run(process.held, lambda one: one.syscall("userfaultfd", os.O_CLOEXEC | 1))


def test_the_process_keeps_none(process: WrittenProcess) -> None:
    made = userfaultfd.create(process.held)
    try:
        assert str(Path(f"/proc/self/fd/{made}").readlink()) == "anon_inode:[userfaultfd]"
        assert list(userfaultfd.opened(process.held)) == []
    finally:
        os.close(made)


def test_what_another_one_left_is_closed(process: WrittenProcess) -> None:
    number = left_by_another(process)
    assert list(userfaultfd.opened(process.held)) == [number]
    os.close(userfaultfd.create(process.held))
    assert list(userfaultfd.opened(process.held)) == []
    assert userfaultfd.close_unused(process.held) == 0


def test_a_userfaultfd_in_use_is_not_closed(process: WrittenProcess) -> None:
    number = left_by_another(process)
    copy = userfaultfd.duplicate(process.held, number)
    try:
        write_tracking.enable(copy)
        assert userfaultfd.close_unused(process.held) == 0
        assert list(userfaultfd.opened(process.held)) == [number]
    finally:
        os.close(copy)


def test_one_that_is_not_there_cannot_be_duplicated(process: WrittenProcess) -> None:
    with pytest.raises(OSError, match="pidfd_getfd: Bad file descriptor"):
        userfaultfd.duplicate(process.held, 999)
