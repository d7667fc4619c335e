"""QEMU's COLO stream, the receiving side: memory and device state of one checkpoint after another.

The layout is in QEMU's migration/colo.c: first a whole migration stream, then messages of 32 bits
in both directions, with memory sections and a device state of told length between them. Pure.
"""

import struct
from collections.abc import Callable
from enum import StrEnum

from vmckpt.capture.qemu_stream import devices
from vmckpt.capture.qemu_stream.header import EOF, NeedMore, damaged
from vmckpt.capture.qemu_stream.stream import Sink, StreamParser

READY, REQUEST, REPLY, SEND, SIZE, RECEIVED, LOADED = range(7)
"""Messages, as QEMU numbers them."""
MOST_STATE = 64 << 20
"""Bytes of device state; QEMU's has tens of KiB."""

_WORD = struct.Struct(">I")
_SIZED = struct.Struct(">IQ")


class Stage(StrEnum):
    """How far the conversation is."""

    FIRST = "first"
    """All of memory comes; that it has ended is told by QEMU's monitor and not by the stream."""
    OPEN = "open"
    """The guest runs, and QEMU has not asked yet."""
    ASKED = "asked"
    """QEMU waits for our reply; the guest runs."""
    STOPPING = "stopping"
    MEMORY = "memory"
    """The guest stands still; pages come."""
    STATE = "state"
    """Device state comes."""
    WHOLE = "whole"
    """All of the checkpoint is here; the guest stands still until `loaded`."""


class ColoParser(StreamParser):
    """Takes what QEMU sends, cut anywhere; pages go to the sink, whose `tail` is never called.

    What QEMU says out of its turn or not at all is StreamDamaged, after which it is of no use.
    """

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self.stage = Stage.FIRST
        self._taken = bytearray()
        self._left = 0

    @property
    def state(self) -> bytes:
        """Device state, as it came: sections up to EOF; in the first pass with a description."""
        return bytes(self._taken)

    def ready(self) -> bytes:
        """What to send once QEMU's monitor says that the first pass is over: the guest runs.

        Raises StreamDamaged if the first pass is not whole.
        """
        self._expect(Stage.FIRST)
        self.finish()
        devices.check_tail(self.state)
        self.stage, self._step = Stage.OPEN, self._message
        return _WORD.pack(READY)

    def reply(self) -> bytes:
        """What to send to have a checkpoint taken now: the guest is stopped."""
        self._expect(Stage.ASKED)
        self.stage = Stage.STOPPING
        return _WORD.pack(REPLY)

    def loaded(self) -> bytes:
        """What to send when all of a checkpoint was taken: the guest goes on."""
        self._expect(Stage.WHOLE)
        self.stage = Stage.OPEN
        return _WORD.pack(RECEIVED) + _WORD.pack(LOADED)

    def _expect(self, stage: Stage) -> None:
        if self.stage is not stage:
            raise damaged(self._offset, f"stage {self.stage!r} where {stage!r} should be")

    def _after_memory(self, kind: int) -> Callable[[memoryview], int]:
        if self.stage is Stage.FIRST:
            return self._tail
        if kind != EOF:
            raise damaged(self._offset, f"a section of type {kind:#04x} in a checkpoint's memory")
        return self._memory_over

    def _tail(self, view: memoryview) -> int:
        if len(self._taken) + len(view) > MOST_STATE:
            raise damaged(self._offset, f"more than {MOST_STATE} bytes of device state")
        self._taken += view
        return len(view)

    def _memory_over(self, view: memoryview) -> int:
        self.stage, self._step = Stage.STATE, self._message
        return len(view[:1])

    def _message(self, view: memoryview) -> int:
        if len(view) < _WORD.size:
            raise NeedMore
        (number,) = _WORD.unpack(view[: _WORD.size])
        if (self.stage, number) == (Stage.OPEN, REQUEST):
            self.stage = Stage.ASKED
        elif (self.stage, number) == (Stage.STOPPING, SEND):
            self.stage, self._step = Stage.MEMORY, self._section
        elif (self.stage, number) == (Stage.STATE, SIZE):
            return self._sized(view)
        else:
            raise damaged(self._offset, f"message {number:#x} in stage {self.stage!r}")
        return _WORD.size

    def _sized(self, view: memoryview) -> int:
        if len(view) < _SIZED.size:
            raise NeedMore
        _, size = _SIZED.unpack(view[: _SIZED.size])
        if not 0 < size <= MOST_STATE:
            raise damaged(self._offset, f"a device state of {size} bytes")
        self._taken.clear()
        self._left, self._step = size, self._device
        return _SIZED.size

    def _device(self, view: memoryview) -> int:
        piece = view[: self._left]
        self._taken += piece
        self._left -= len(piece)
        if not self._left:
            if self._taken[-1] != EOF:
                raise damaged(self._offset, "a device state without its end")
            self.stage, self._step = Stage.WHOLE, self._message
        return len(piece)
