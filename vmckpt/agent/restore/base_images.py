"""Keep a restored disk an overlay of its base image, if the host has that image.

The new image gets only the data in which the disk differs from the base image. The contents are
compared completely, so the restored disk is correct whatever the base image contains.
"""

import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from vmckpt.agent.restore import backing_chain
from vmckpt.capture.nbd import protocol as wire
from vmckpt.capture.nbd.client import Client, Extent, Piece
from vmckpt.capture.nbd.session import ABSENT, DATA, ZEROS
from vmckpt.errors import BadInput, HypervisorError
from vmckpt.units import Seconds

_UNIT = 65536
_UNKNOWN = 255
_STEP = 64
"""Units that are compared at once."""
_OPENS = Seconds(30.0)
_TURN = Seconds(0.02)
_FORMATS = ("qcow2", "raw")


@dataclass(frozen=True, slots=True)
class BaseImage:
    """The base image that a disk had when the snapshot was taken."""

    path: str
    format: str
    why_not: str = ""
    """Why the controller does not permit use of the image; empty: the image may be used."""

    @classmethod
    def parse(cls, told: Sequence[str]) -> "BaseImage":
        """Parse a base image from an order. Raises TypeError."""
        return cls(*(str(one) for one in told))


class Base(Protocol):
    """The content of a base image; implemented by `capture.nbd.client.Client`."""

    @property
    def size(self) -> int: ...
    def extents(
        self, context: str, offset: int = 0, length: int | None = None
    ) -> Iterator[Extent]: ...
    def read_many(self, pieces: Iterable[tuple[int, int]]) -> Iterator[Piece]: ...


def require_usable(
    base: BaseImage, format_: str, written: Collection[str], users: Mapping[str, Sequence[str]]
) -> None:
    """Check that a base image exists, and that no guest and no restore writes to its chain.

    `format_`: format of the new image; `written`: paths of all new images; `users`: guest and
    format of each image of other guests, by path. Raises BadInput with the reason.
    """
    if base.why_not:
        raise BadInput(base.why_not)
    if format_ != "qcow2" or base.format not in _FORMATS:
        raise BadInput(
            f"an image of format {format_} cannot have a base image of format {base.format}"
        )
    chain = _chain(base)
    for path in chain:
        if not path.is_file() or path.resolve() != path:
            raise BadInput(
                f"{path} is not a regular file on this host, or its path has symbolic links"
            )
        for user, (guest, user_format) in users.items():
            # Only a guest's own images have a format here; it does not write to backing files.
            if user_format and Path(user).exists() and path.samefile(user):
                raise BadInput(f"guest {guest} uses {path} as its disk")
        if any(Path(one).exists() and path.samefile(one) for one in written):
            raise BadInput(f"{path} is replaced by the same restore")


def _chain(base: BaseImage) -> list[Path]:
    if not Path(base.path).exists():
        raise BadInput(f"{base.path} is not on this host")
    return [Path(one) for one in backing_chain.chain(base.path, base.format, in_use=False)]


@contextmanager
def opened(base: BaseImage, socket: Path, host: str) -> Iterator[Client]:
    """Open a base image for reading; QEMU's lock prevents other programs from writing to it.

    `socket`: path of the socket to create. Raises BadInput if the image cannot be opened.
    """
    words = ["qemu-nbd", "--read-only", "--persistent", f"--format={base.format}"]
    # qemu-nbd is killed with this process.
    with subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *words, f"--socket={socket}", "--", base.path],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as program:  # fmt: skip
        try:
            with _connected(program, base, socket, host) as client:
                yield client
        finally:
            program.kill()
            socket.unlink(missing_ok=True)


def _connected(
    program: "subprocess.Popen[str]", base: BaseImage, socket: Path, host: str
) -> Client:
    give_up = time.monotonic() + _OPENS
    while True:
        try:
            return Client(wire.Unix(str(socket)), "", host=host, contexts=[wire.ALLOCATION])
        except HypervisorError as exc:
            if program.poll() is not None:
                said = program.stderr.read() if program.stderr is not None else ""
                raise BadInput(f"{base.path} cannot be opened: {_line(said)}") from exc
            if time.monotonic() > give_up:
                raise BadInput(f"{base.path} cannot be opened: {exc.message}") from exc
        time.sleep(_TURN)


def _line(said: str) -> str:
    return " ".join(said.split())[:200] or "no reason given"


class Comparison:
    """Compares a disk with its base image, unit by unit, when `kinds` needs the result.

    Several threads may call `kinds`.
    """

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        zeros: Callable[[int, int], Iterable[tuple[int, bool]]],
        size: int,
        base: Base,
        stopped: Callable[[], bool],
    ) -> None:
        """`read`, `zeros` and `size` (in bytes) describe the disk, as in `store.assemble.Assembly`.

        `stopped`: whether to give up.
        """
        self._read, self._runs, self._size = read, zeros, size
        self._base, self._stopped = base, stopped
        self._known = np.full(-(-size // _UNIT), _UNKNOWN, dtype=np.uint8)
        self._lock = threading.Lock()

    def kinds(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """Yield (length, kind) of the extents in a range; see `capture.nbd.session.Export`.

        An extent is ABSENT if the base image has the same content. Raises OSError if stopped,
        StoreError, HypervisorError.
        """
        first, last = offset // _UNIT, -(-(offset + length) // _UNIT)
        with self._lock:
            for start in range(first, last, _STEP):
                if self._stopped():
                    raise OSError("stopped")
                self._compare(start, min(start + _STEP, last))
            known = self._known[first:last].copy()
        cuts = [0, *(np.flatnonzero(np.diff(known)) + 1).tolist(), len(known)]
        for low, high in pairwise(cuts):
            begin = max(offset, (first + low) * _UNIT)
            end = min(offset + length, (first + high) * _UNIT)
            yield end - begin, int(known[low])

    def _compare(self, start: int, end: int) -> None:
        if not (self._known[start:end] == _UNKNOWN).any():
            return
        begin = start * _UNIT
        length = min(end * _UNIT, self._size) - begin
        zeros, base_zeros = self._zeros(begin, length), self._base_zeros(begin, length)
        kinds = np.where(zeros, np.where(base_zeros, ABSENT, ZEROS), DATA).astype(np.uint8)
        both = np.flatnonzero(~zeros & ~base_zeros)
        for unit in both.tolist():
            at = begin + unit * _UNIT
            count = min(_UNIT, self._size - at)
            if self._read(at, count) == self._base_bytes(at, count):
                kinds[unit] = ABSENT
        self._known[start:end] = kinds

    def _zeros(self, begin: int, length: int) -> "np.typing.NDArray[np.bool_]":
        found = np.zeros(-(-length // _UNIT), dtype=bool)
        at = 0
        for count, zero in self._runs(begin, length):
            found[at // _UNIT : -(-(at + count) // _UNIT)] = zero
            at += count
        return found

    def _base_zeros(self, begin: int, length: int) -> "np.typing.NDArray[np.bool_]":
        """Return which units of the base image are zero; units beyond its end count as zero."""
        found = np.ones(-(-length // _UNIT), dtype=bool)
        there = min(length, self._base.size - begin)
        if there > 0:
            for one in self._base.extents(wire.ALLOCATION, begin, there):
                if not one.flags & wire.ZERO:
                    low, high = one.offset - begin, one.end - begin
                    found[low // _UNIT : -(-high // _UNIT)] = False
        return found

    def _base_bytes(self, at: int, count: int) -> bytes:
        there = max(0, min(count, self._base.size - at))
        pieces = self._base.read_many([(at, there)] if there else [])
        found = b"".join(bytes(piece.content()) for piece in pieces)
        return found + bytes(count - there)
