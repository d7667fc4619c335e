"""A standby without QEMU, epochs for it, and a process that dies at any step it takes."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from vmckpt.capture.nbd.client import Piece
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.errors import BadInput
from vmckpt.replication.backup.epoch_stage import Stage
from vmckpt.replication.backup.redo_log import DiskLog, put_writes
from vmckpt.replication.disks import write_log
from vmckpt.replication.protocol import page_codec
from vmckpt.replication.protocol.memory_layout import Dimm, Layout
from vmckpt.replication.protocol.messages import DeviceState, EpochEnd, Pages, Part, Tally, Writes

PAGES = (12, 5)
"""Pages of each memory file."""
SECTOR = 512
DISKS = (8 * SECTOR, 3 * SECTOR)


class Died(BaseException):
    """The process was killed."""


@dataclass
class Steps:
    """Counts what would be seen from outside; one of the steps is the last, or fails."""

    stop: int | None = None
    error: int | None = None
    """An errno that the step fails with; None: the process dies."""
    half: bool = False
    """Some of the step is done."""
    taken: int = 0
    dead: bool = False

    def step(self, half: Callable[[], object]) -> None:
        if self.dead:
            raise Died
        self.taken += 1
        if self.stop is None or self.taken != self.stop:
            return
        if self.half:
            half()
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        self.dead = True
        raise Died


def nothing() -> None:
    """Half of a step that is done whole or not at all."""


class Guarded(np.ndarray[Any, Any]):
    """Memory that is written in steps."""

    steps: Steps

    def __setitem__(self, key: Any, value: Any) -> None:
        def half() -> None:
            for number, page in list(zip(key, value, strict=True))[: len(key) // 2]:
                np.asarray(self)[number] = page
            if len(key):
                np.asarray(self)[key[0], :100] = value[0][:100]

        self.steps.step(half)
        np.asarray(self)[key] = value


@dataclass
class Ram:
    """A file of the standby's memory; it outlives the agent."""

    content: NDArray[np.uint64]
    steps: Steps = field(default_factory=Steps)

    @property
    def pages(self) -> NDArray[np.uint64]:
        guarded = self.content.view(Guarded)
        guarded.steps = self.steps
        return guarded


@dataclass
class Disk:
    """A disk of the standby; what was not flushed may be lost with the power."""

    content: bytearray
    durable: bytes = b""
    steps: Steps = field(default_factory=Steps)

    def __post_init__(self) -> None:
        self.durable = bytes(self.content)

    @property
    def size(self) -> int:
        return len(self.content)

    def write(self, offset: int, data: memoryview, /) -> None:
        assert offset + len(data) <= self.size
        middle = len(data) // 2
        self.steps.step(lambda: self._put(offset, data[:middle]))
        self._put(offset, data)

    def zeros(self, offset: int, length: int, /) -> None:
        self.write(offset, memoryview(bytes(length)))

    def read_many(self, pieces: Iterable[tuple[int, int]], /) -> Iterator[Piece]:
        return pieces_of(self.content, pieces)

    def flush(self) -> None:
        self.steps.step(nothing)
        self.durable = bytes(self.content)

    def _put(self, offset: int, data: memoryview) -> None:
        self.content[offset : offset + len(data)] = data

    def lose(self, chance: Random) -> None:
        """The power goes; of each sector that was not flushed either content is there."""
        self.content[:] = mixed(bytes(self.content), self.durable, chance)
        self.durable = bytes(self.content)


def pieces_of(content: bytearray, pieces: Iterable[tuple[int, int]]) -> Iterator[Piece]:
    """What an NBD client reads of a disk; of zeros it is told that they are."""
    for offset, length in pieces:
        data = bytes(content[offset : offset + length])
        yield Piece(offset, length, memoryview(data) if any(data) else None)


def mixed(new: bytes, old: bytes, chance: Random) -> bytes:
    """Of each sector the old or the new content."""
    kept = old[: len(new)].ljust(len(new), b"\0")
    return b"".join(
        chance.choice((new, kept))[at : at + SECTOR] for at in range(0, len(new), SECTOR)
    )


@dataclass(frozen=True)
class World:
    """All that belongs to an epoch; what the standby must be, whole."""

    memory: tuple[bytes, ...]
    disks: tuple[bytes, ...]
    state: bytes

    def pages(self, file: int) -> NDArray[np.uint64]:
        return np.frombuffer(self.memory[file], dtype=np.uint64).reshape(-1, 512)


EMPTY = World(
    memory=tuple(bytes(4096 * count) for count in PAGES),
    disks=tuple(map(bytes, DISKS)),
    state=b"",
)


@dataclass(frozen=True)
class Epoch:
    """What the primary sends, and what the standby must be after it."""

    number: int
    parts: tuple[Part, ...]
    seal: EpochEnd
    after: World


def epoch(
    number: int, before: World, *, base: int | None = None, chance: Random | None = None
) -> Epoch:
    """An epoch that changes some of everything; with `chance`, some of anything or nothing."""
    fixed = chance is None
    chance = chance or Random(number)
    parts: list[Part] = []
    memory, disks = list(before.memory), list(before.disks)
    for file, count in enumerate(PAGES):
        for some in _split(range(count), chance, least=2 if fixed else 0):
            numbers, new = np.array(some, dtype=np.intp), before.pages(file)[some].copy()
            for at in range(len(some)):
                new[at, chance.randrange(512)] = chance.getrandbits(64) * chance.randrange(2)
                new[at] *= np.uint64(chance.random() > 0.1)
            whole = np.frombuffer(memory[file], dtype=np.uint64).reshape(-1, 512).copy()
            whole[numbers] = new
            memory[file] = whole.tobytes()
            data = page_codec.encode(numbers, new, before.pages(file)[numbers])
            parts.append(Pages(epoch=number, file=file, data=data))
    for disk, size in enumerate(DISKS):
        for _ in range(chance.randrange(3) + fixed):
            content = bytearray(disks[disk])
            parts.append(Writes(epoch=number, disk=disk, data=_writes(content, size, chance)))
            disks[disk] = bytes(content)
    state = before.state[:200] + chance.randbytes(300)
    parts.append(
        DeviceState(epoch=number, data=page_codec.encode_state(state, before.state or None))
    )
    after = World(memory=tuple(memory), disks=tuple(disks), state=state)
    sealed = seal(number, number - 1 if base is None else base, parts)
    return Epoch(number=number, parts=tuple(parts), seal=sealed, after=after)


def seal(number: int, base: int, parts: list[Part], *, final: bool = False) -> EpochEnd:
    tally = Tally()
    for part in parts:
        tally.add(part)
    return EpochEnd(
        epoch=number, base=base, messages=tally.count, digest=tally.digest(),
        final=final, taken=1.5,
    )  # fmt: skip


def _split(numbers: range, chance: Random, *, least: int) -> Iterator[list[int]]:
    some = sorted(chance.sample(numbers, chance.randrange(least, len(numbers) + 1)))
    cut = chance.randrange(len(some) + 1)
    yield from (piece for piece in (some[:cut], some[cut:]) if piece)


def _writes(content: bytearray, size: int, chance: Random) -> bytes:
    """Some records, done to the content as well."""
    made = b""
    for _ in range(chance.randrange(1, 4)):
        offset = chance.randrange(size // SECTOR) * SECTOR
        length = min(chance.randrange(1, 3) * SECTOR, size - offset)
        kind = chance.choice((write_log.DATA, write_log.DATA, write_log.ZEROS, write_log.TRIM))
        data = chance.randbytes(length) if kind == write_log.DATA else b""
        made += write_log.header(offset, length, kind) + data
        content[offset : offset + length] = data or bytes(length)
    return packed(made)


def packed(records: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(records)


@contextmanager
def in_memory() -> Iterator[Path]:
    """A folder on tmpfs, where an fsync costs nothing."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place, prefix="vmckpt-test-") as folder:
        yield Path(folder)


class Standby:
    """Memory and disks that outlive the agent, and the folders that it keeps epochs in."""

    def __init__(self, tmpfs: Path, disk: Path) -> None:
        self.folder, self.log = tmpfs / "stage", disk / "log"
        self.memory = [Ram(np.zeros((count, 512), dtype=np.uint64)) for count in PAGES]
        self.disks = [Disk(bytearray(size)) for size in DISKS]
        self.dimms: list[Dimm] = []
        self.full = False
        """It takes no DIMMs."""

    def fit(self, layout: Layout) -> bool:
        """Get the DIMMs that it lacks. Returns whether it got any."""
        known = {one.name for one in self.dimms}
        new = [one for one in layout.dimms if one.name not in known]
        if self.full and new:
            raise BadInput("beta has no free memory")
        for one in new:
            self.dimms.append(one)
            pages = np.zeros((one.size // PAGE, 512), dtype=np.uint64)
            self.memory.append(Ram(pages))
        return bool(new)

    def stage(self, steps: Steps | None = None) -> Stage:
        """An agent that starts."""
        self.watch(steps or Steps())
        return Stage(self.folder, self.log, self.memory, self.disks)

    def watch(self, steps: Steps) -> None:
        """What is done to memory and disks counts as steps."""
        for ram in self.memory:
            ram.steps = steps
        for disk in self.disks:
            disk.steps = steps

    def world(self, stage: Stage) -> World:
        return World(
            memory=tuple(one.content.tobytes() for one in self.memory),
            disks=tuple(bytes(one.content) for one in self.disks),
            state=stage.state() if stage.committed else b"",
        )


def send(stage: Stage, sent: Epoch) -> None:
    """All of an epoch but its applying."""
    for part in sent.parts:
        stage.take(part)
    assert stage.seal(sent.seal) == sent.number


@contextmanager
def stepping(steps: Steps) -> Iterator[None]:
    """The system calls that others could see are steps, too."""
    with pytest.MonkeyPatch.context() as patch:
        real = os.pwrite

        def pwrite(file: int, data: Any, offset: int) -> int:
            steps.step(lambda: real(file, memoryview(data)[: len(data) // 2], offset))
            return real(file, data, offset)

        patch.setattr(os, "pwrite", pwrite)
        for name in ("rename", "unlink", "fdatasync", "fsync", "ftruncate"):
            patch.setattr(os, name, _counted(steps, getattr(os, name)))
        yield


def _counted(steps: Steps, call: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*arguments: Any, **named: Any) -> Any:
        steps.step(nothing)
        return call(*arguments, **named)

    return counted


def run(stage: Stage, *epochs: Epoch) -> None:
    for one in epochs:
        send(stage, one)
        stage.apply()


def redo_disks(log: Path, disks: Sequence[Disk]) -> bool:
    """After the standby's host lost its memory: bring the disks to the end of an epoch.

    False: they are nothing whole, for they were being copied.
    """
    if not log.exists():
        return False
    file = DiskLog(log)
    try:
        head = file.head()
        # If the log lacks some of it, none of this epoch has reached the disks, or all of it has.
        if head is not None and file.holds_epoch(*head):
            put_writes(file, head[1].length, disks)
    finally:
        file.close()
    return head is not None


def restarted(standby: Standby) -> tuple[int, World]:
    """What a new agent finds: the epoch, and what the standby is."""
    with standby.stage() as stage:
        assert stage.applied
        return stage.committed, standby.world(stage)
