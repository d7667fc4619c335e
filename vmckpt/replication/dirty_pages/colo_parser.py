"""Parse QEMU's COLO stream: memory and device state of one checkpoint after another. Pure.

The layout follows QEMU's migration/colo.c: first a complete migration stream, then 32-bit messages
in both directions. Between messages are memory sections and a device state of stated length.
"""

import struct
from collections.abc import Callable
from enum import StrEnum

from vmckpt.capture.qemu_stream import devices
from vmckpt.capture.qemu_stream.header import EOF, NeedMore, damaged
from vmckpt.capture.qemu_stream.stream import Sink, StreamParser

READY, REQUEST, REPLY, SEND, SIZE, RECEIVED, LOADED = range(7)
"""Message numbers of QEMU's protocol."""
MOST_STATE = 64 << 20
"""Maximum size of a device state, in bytes; usual sizes are tens of KiB."""

_WORD = struct.Struct(">I")
_SIZED = struct.Struct(">IQ")


class Stage(StrEnum):
    """The stage that the protocol is in."""

    FIRST = "first"
    """All memory is being received. QEMU's monitor, not the stream, reports the end."""
    OPEN = "open"
    """The guest is running, and QEMU has not asked for a checkpoint yet."""
    ASKED = "asked"
    """QEMU is waiting for the reply; the guest is running."""
    STOPPING = "stopping"
    MEMORY = "memory"
    """The guest is paused; pages are being received."""
    STATE = "state"
    """The device state is being received."""
    WHOLE = "whole"
    """The checkpoint is complete; the guest is paused until `loaded`."""


class ColoParser(StreamParser):
    """Parses QEMU's data, in pieces of any size. Pages go to the sink, whose `tail` is unused.

    An unexpected or unknown message raises StreamDamaged, after which the parser cannot be used.
    """

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self.stage = Stage.FIRST
        self._taken = bytearray()
        self._left = 0

    @property
    def state(self) -> bytes:
        """The device state as received: sections up to EOF, and a description in the first pass."""
        return bytes(self._taken)

    def ready(self) -> bytes:
        """Return the message to send once QEMU's monitor reports the end of the first pass.

        QEMU resumes the guest when it receives this message. Raises StreamDamaged if the first pass
        is not complete.
        """
        self._expect(Stage.FIRST)
        self.finish()
        devices.check_tail(self.state)
        self.stage, self._step = Stage.OPEN, self._message
        return _WORD.pack(READY)

    def reply(self) -> bytes:
        """Return the message that starts a checkpoint, for which QEMU pauses the guest.

        Raises StreamDamaged if QEMU has not asked for a checkpoint.
        """
        self._expect(Stage.ASKED)
        self.stage = Stage.STOPPING
        return _WORD.pack(REPLY)

    def loaded(self) -> bytes:
        """Return the messages to send when a checkpoint is complete; QEMU then resumes the guest.

        Raises StreamDamaged if the checkpoint is not complete.
        """
        self._expect(Stage.WHOLE)
        self.stage = Stage.OPEN
        return _WORD.pack(RECEIVED) + _WORD.pack(LOADED)

    def _expect(self, stage: Stage) -> None:
        if self.stage is not stage:
            raise damaged(self._offset, f"the stream is in stage {self.stage}, not {stage}")

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
            raise damaged(self._offset, f"message {number:#x} in stage {self.stage}")
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
