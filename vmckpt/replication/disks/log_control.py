"""The few numbers that a disk's nbdkit and the agent share, in a small file that both have mapped.

Only the standard library: the nbdkit plugin reads them under Debian's own Python. Each number is
eight aligned bytes, stored and read as one, and has one writer; so nobody ever sees half of one.
"""

import mmap
import os
import sys
from pathlib import Path
from typing import Self

SIZE = 4096
MARK = 0x564D434B4C4F4731  # "VMCKLOG1"
"""The first number of the file; another form gets another mark."""

_MARK, _CONSUMED, _NEVER_WAIT, _WRITTEN, _FAILED, _WAITED, _PROCESS = range(7)


class Control:
    """The mapped file. Close it at the end, or use it as `with Control(path) as control`."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, and ValueError if the file is none of these."""
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._mapped = mmap.mmap(file, SIZE)
        finally:
            os.close(file)
        self._numbers = memoryview(self._mapped).cast("Q")
        if self._numbers[_MARK] != MARK:
            self.close()
            raise ValueError(f"{path} is no control file of a write log")

    @staticmethod
    def create(path: Path) -> None:
        """A new one: nothing is written, nothing is consumed. Raises OSError."""
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
        """Where in the log that begins which is still needed; the agent says so."""
        return self._numbers[_CONSUMED]

    @consumed.setter
    def consumed(self, end: int) -> None:
        self._numbers[_CONSUMED] = end

    @property
    def never_wait(self) -> bool:
        """No write may wait for room; the agent says so."""
        return self._numbers[_NEVER_WAIT] != 0

    @never_wait.setter
    def never_wait(self, on: bool) -> None:
        self._numbers[_NEVER_WAIT] = int(on)

    @property
    def written(self) -> int:
        """Where the log's last whole record ends; the plugin says so, as all that follows."""
        return self._numbers[_WRITTEN]

    @written.setter
    def written(self, end: int) -> None:
        self._numbers[_WRITTEN] = end

    @property
    def failed(self) -> int:
        """Why a write was refused, which is not in the log (an errno); 0: none was."""
        return self._numbers[_FAILED]

    @failed.setter
    def failed(self, number: int) -> None:
        self._numbers[_FAILED] = number

    @property
    def waited(self) -> int:
        """For how long writes have waited for room, in nanoseconds; it grows while one waits."""
        return self._numbers[_WAITED]

    @waited.setter
    def waited(self, nanoseconds: int) -> None:
        self._numbers[_WAITED] = nanoseconds

    @property
    def process(self) -> int:
        """The nbdkit's number; 0: it does not serve yet."""
        return self._numbers[_PROCESS]

    @process.setter
    def process(self, number: int) -> None:
        self._numbers[_PROCESS] = number
