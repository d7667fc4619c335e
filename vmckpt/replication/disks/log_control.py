"""The control file of a write log: numbers that a disk's nbdkit and the agent share by mapping it.

This module needs only the standard library, since the nbdkit plugin runs under Debian's own Python.
Each number is eight aligned bytes, read and written in one access, and has one writer at a time. So
no reader sees a partly written number.
"""

import mmap
import os
import sys
from pathlib import Path
from typing import Self

SIZE = 4096
MARK = 0x564D434B4C4F4731  # "VMCKLOG1"
"""The first number in the file; a different layout gets a different number."""

_MARK, _CONSUMED, _NEVER_WAIT, _WRITTEN, _FAILED, _WAITED, _PROCESS = range(7)


class Control:
    """A mapped control file. Use as `with Control(path) as control`, or call `close` at the end."""

    def __init__(self, path: Path) -> None:
        """Map a file. Raises OSError, and ValueError if the file is not a control file."""
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._mapped = mmap.mmap(file, SIZE)
        finally:
            os.close(file)
        self._numbers = memoryview(self._mapped).cast("Q")
        if self._numbers[_MARK] != MARK:
            self.close()
            raise ValueError(f"{path} is not a control file of a write log")

    @staticmethod
    def create(path: Path) -> None:
        """Create the control file of an empty log. Raises OSError."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as made:
            made.write(MARK.to_bytes(8, sys.byteorder))
            made.truncate(SIZE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._numbers.release()
        self._mapped.close()

    @property
    def consumed(self) -> int:
        """The offset where the part of the log that is still needed begins; set by the agent."""
        return self._numbers[_CONSUMED]

    @consumed.setter
    def consumed(self, end: int) -> None:
        self._numbers[_CONSUMED] = end

    @property
    def never_wait(self) -> bool:
        """Whether writes must not wait for space.

        The agent sets this. The watchdog resets this after it has resumed the guest.
        """
        return self._numbers[_NEVER_WAIT] != 0

    @never_wait.setter
    def never_wait(self, on: bool) -> None:
        self._numbers[_NEVER_WAIT] = int(on)

    @property
    def written(self) -> int:
        """The end of the last complete record. The plugin sets this and all numbers below."""
        return self._numbers[_WRITTEN]

    @written.setter
    def written(self, end: int) -> None:
        self._numbers[_WRITTEN] = end

    @property
    def failed(self) -> int:
        """The errno of a write that was refused and is not in the log; 0: no write was refused."""
        return self._numbers[_FAILED]

    @failed.setter
    def failed(self, number: int) -> None:
        self._numbers[_FAILED] = number

    @property
    def waited(self) -> int:
        """Total time for which writes have waited for space, in nanoseconds; it grows while a write
        is waiting."""
        return self._numbers[_WAITED]

    @waited.setter
    def waited(self, nanoseconds: int) -> None:
        self._numbers[_WAITED] = nanoseconds

    @property
    def process(self) -> int:
        """The process ID of nbdkit; 0: it is not serving yet."""
        return self._numbers[_PROCESS]

    @process.setter
    def process(self, number: int) -> None:
        self._numbers[_PROCESS] = number
