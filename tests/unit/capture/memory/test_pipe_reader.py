"""QEMU's stream is taken through a pipe as fast as it comes, whatever becomes of it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vmckpt.capture.memory.pipe_reader import Drain, Tape
from vmckpt.capture.migration_settings import PIPE
from vmckpt.errors import StreamDamaged


class Qemu:
    """Keeps the pipe that it was given."""

    pipe = -1

    def tell(self, command: str, arguments: dict[str, Any], *, files: tuple[int, ...]) -> None:
        assert (command, arguments) == ("getfd", {"fdname": PIPE})
        self.pipe = os.dup(files[0])

    def send(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.pipe, data) :]

    def close(self) -> None:
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1


@pytest.fixture
def qemu() -> Iterator[Any]:
    made = Qemu()
    yield made
    made.close()


class Flowing(Tape):
    """Flows once something has come; it cannot stand a certain byte."""

    def feed(self, data: memoryview) -> None:
        if b"!" in bytes(data):
            raise StreamDamaged("it makes no sense")
        super().feed(data)
        self.flowing = True


def test_all_that_was_sent_is_taken_until_the_pipe_is_closed(qemu: Any) -> None:
    content = bytes(range(64, 256)) * 16384
    tape = Flowing()
    with Drain(tape) as drain:
        drain.hand_over(qemu)
        assert not drain.flowing.is_set()
        qemu.send(content)
        assert drain.flowing.wait(5.0)
        assert not drain.ended(0.0)
        qemu.close()
        assert drain.ended(5.0)
    assert tape.data == content


def test_qemu_gets_rid_of_its_stream_though_it_makes_no_sense(qemu: Any) -> None:
    tape = Flowing()
    with Drain(tape) as drain:
        drain.hand_over(qemu)
        qemu.send(b"!" + bytes(3 << 20))
        qemu.close()
        with pytest.raises(StreamDamaged):
            drain.ended(5.0)
    assert tape.data == b""


def test_what_nobody_wants_any_more_is_taken_and_forgotten(qemu: Any) -> None:
    tape = Flowing()
    with Drain(tape) as drain:
        drain.hand_over(qemu)
        drain.discard()
        qemu.send(bytes(3 << 20))
        qemu.close()
        assert drain.ended(5.0)
    assert tape.data == b""


def test_whoever_leaves_does_not_wait_for_qemu_and_leaves_no_pipe(qemu: Any) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with Drain(Tape()) as drain:
        drain.hand_over(qemu)
    with pytest.raises(BrokenPipeError):
        qemu.send(b"x")
    qemu.close()
    with Drain(Tape()):
        pass
    assert set(Path("/proc/self/fd").iterdir()) == before
