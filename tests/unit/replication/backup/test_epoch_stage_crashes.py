"""An epoch reaches the standby whole or not at all, whatever dies whenever."""

import errno
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.staging import (
    EMPTY,
    Died,
    Standby,
    Steps,
    epoch,
    in_memory,
    mixed,
    packed,
    redo_disks,
    restarted,
    run,
    seal,
    send,
    stepping,
)
from vmckpt.capture.memory.page_diff import Mapping
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.replication.backup.epoch_stage import WRITES, Stage
from vmckpt.replication.backup.redo_log import StageError, StageFull
from vmckpt.replication.disks import write_log
from vmckpt.replication.protocol import page_codec
from vmckpt.replication.protocol.messages import DeviceState, Pages, Part, Writes

FIRST = epoch(1, EMPTY)
SECOND = epoch(2, FIRST.after)
THIRD = epoch(3, SECOND.after)


@pytest.fixture
def place() -> Iterator[Path]:
    with in_memory() as folder:
        yield folder


@pytest.fixture
def standby(place: Path) -> Standby:
    return Standby(place, place)


def life(standby: Standby, steps: Steps) -> int:
    """An agent takes three epochs, or as many as it lives for; the last one acknowledged."""
    acknowledged = 0
    with suppress(Died), stepping(steps), standby.stage(steps) as stage:
        for one in (FIRST, SECOND, THIRD):
            send(stage, one)
            acknowledged = one.number
            stage.apply()
    return acknowledged


AFTER = {0: EMPTY, 1: FIRST.after, 2: SECOND.after, 3: THIRD.after}


@pytest.mark.parametrize("half", [False, True])
def test_killed_at_any_step_the_next_agent_finds_a_whole_epoch(place: Path, half: bool) -> None:
    whole = Steps()
    life(Standby(place / "whole", place / "whole"), whole)
    for stop in range(1, whole.taken + 1):
        standby = Standby(place / str(stop), place / str(stop))
        acknowledged = life(standby, Steps(stop=stop, half=half))
        committed, found = restarted(standby)

        assert committed in (acknowledged, acknowledged + 1)
        assert found == AFTER[committed]
        with standby.stage() as stage:
            run(stage, *(FIRST, SECOND, THIRD)[committed:])
            assert standby.world(stage) == THIRD.after
    assert whole.taken > 60


def test_killed_again_while_it_does_so_it_does_it_again(standby: Standby) -> None:
    with standby.stage() as stage:
        run(stage, FIRST)
        send(stage, SECOND)
    for stop in range(1, 100):
        steps = Steps(stop=stop, half=True)
        with suppress(Died), stepping(steps), standby.stage(steps):
            break
    else:
        pytest.fail("it never came to an end")
    assert stop > 5
    assert restarted(standby) == (2, SECOND.after)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_step_that_fails_leaves_the_last_epoch_usable(place: Path, code: int) -> None:
    kind = StageFull if code == errno.ENOSPC else StageError
    failed: set[str] = set()
    for stop in range(1, 200):
        standby = Standby(place / str(stop), place / str(stop))
        with standby.stage() as stage:
            run(stage, FIRST)
            steps = Steps(stop=stop, error=code, half=True)
            standby.watch(steps)
            with stepping(steps):
                try:
                    send(stage, SECOND)
                except kind:
                    failed.add("seal")
                    assert (stage.committed, stage.applied) == (1, True)
                    assert standby.world(stage) == FIRST.after
                    send(stage, SECOND)
                with suppress(kind):
                    stage.apply()
                if not stage.applied:
                    failed.add("apply")
                    assert stage.committed == 2
                stage.apply()
            assert standby.world(stage) == SECOND.after
            fired, steps.stop = steps.taken >= stop, None
            run(stage, THIRD)
        assert restarted(standby) == (3, THIRD.after)
        if not fired:
            break
    assert failed == {"seal", "apply"}


@settings(max_examples=80)
@given(seed=st.integers(0, 1 << 32), lives=st.lists(st.integers(1, 90), max_size=6))
def test_whatever_happens_in_whatever_order_the_standby_is_a_whole_epoch(
    seed: int, lives: list[int]
) -> None:
    """Agents die, primaries send anew what was not acknowledged, or something else instead."""
    chance, worlds = Random(seed), {0: EMPTY}
    with in_memory() as name:
        standby = Standby(name, name)
        acknowledged = 0
        for stop in [*lives, None]:
            steps = Steps(stop=stop, half=chance.random() < 0.5)
            with suppress(Died), stepping(steps), standby.stage(steps) as stage:
                assert stage.committed >= acknowledged
                assert standby.world(stage) == worlds[stage.committed]
                for _ in range(4):
                    base = stage.committed
                    sent = epoch(
                        base + chance.randrange(1, 3), worlds[base], base=base, chance=chance
                    )
                    worlds[sent.number] = sent.after
                    if chance.random() < 0.3:  # the connection ends
                        for part in sent.parts[: chance.randrange(len(sent.parts))]:
                            stage.take(part)
                        stage.discard()
                        continue
                    send(stage, sent)
                    acknowledged = sent.number
                    stage.apply()
                    assert standby.world(stage) == sent.after
        assert restarted(standby) == (acknowledged, worlds[acknowledged])


class Powered:
    """What is on the disk under a log when the power goes: of each unsynced sector either."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self._path, self._durable = path, b""
        real = os.fdatasync

        def fdatasync(file: int) -> None:
            real(file)
            self._durable = path.read_bytes()

        patch.setattr(os, "fdatasync", fdatasync)

    def lose(self, chance: Random) -> None:
        if self._path.exists():
            self._path.write_bytes(mixed(self._path.read_bytes(), self._durable, chance))


@settings(max_examples=80)
@given(seed=st.integers(0, 1 << 32), stop=st.integers(1, 110))
def test_after_a_loss_of_power_the_disks_can_be_made_whole(seed: int, stop: int) -> None:
    chance, sent = Random(seed), [FIRST, SECOND]
    for number in range(3, 6):
        sent.append(epoch(number, sent[-1].after, chance=chance))
    with in_memory() as name, pytest.MonkeyPatch.context() as patch:
        standby = Standby(name, name)
        steps, acknowledged = Steps(stop=stop, half=chance.random() < 0.5), 0
        power = Powered(standby.log / WRITES, patch)
        with suppress(Died), stepping(steps), standby.stage(steps) as stage:
            for one in sent:
                send(stage, one)
                acknowledged = one.number
                stage.apply()
        power.lose(chance)
        for disk in standby.disks:
            disk.lose(chance)
            disk.steps = Steps()
        shutil.rmtree(standby.folder)
        whole = redo_disks(standby.log / WRITES, standby.disks)

        assert whole or not acknowledged
        candidates = [EMPTY, *(one.after for one in sent)]
        if whole:
            found = tuple(bytes(disk.content) for disk in standby.disks)
            assert found in [one.disks for one in candidates[acknowledged : acknowledged + 2]]


def kept(path: Path, words: int) -> NDArray[np.uint64]:
    """Words that outlive a process."""
    with path.open("a+b") as file:
        file.truncate(8 * words)
        return np.memmap(path, dtype=np.uint64, mode="r+", shape=(words,))


class Image:
    """A disk that outlives a process."""

    def __init__(self, path: Path, size: int) -> None:
        self.size, self._bytes = size, kept(path, size // 8).view(np.uint8)

    def write(self, offset: int, data: memoryview, /) -> None:
        self._bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def zeros(self, offset: int, length: int, /) -> None:
        self._bytes[offset : offset + length] = 0

    def flush(self) -> None:
        pass

    def content(self) -> bytes:
        return self._bytes.tobytes()


NUMBERS = np.arange(300)


def endless(stage: Stage, said: int, memory: Mapping) -> None:
    """Every page and the whole disk hold the epoch's number, for ever; a pipe hears of each."""
    while True:
        number, here = stage.committed + 1, np.uint64(stage.committed + 1)
        new = np.full((len(NUMBERS), 512), here)
        before = stage.state() if number > 1 else None
        written = np.full(1024, here).tobytes()
        parts: list[Part] = [
            Pages(
                epoch=number, file=0, data=page_codec.encode(NUMBERS, new, memory.pages[NUMBERS])
            ),
            Writes(epoch=number, disk=0, data=packed(write_log.header(0, 8192) + written)),
            DeviceState(
                epoch=number, data=page_codec.encode_state(number.to_bytes(8, "big") * 99, before)
            ),
        ]
        for part in parts:
            stage.take(part)
        stage.seal(seal(number, number - 1, parts))
        os.write(said, number.to_bytes(8, "big"))
        stage.apply()


def test_agents_that_are_really_killed_leave_a_whole_epoch(place: Path) -> None:
    chance, acknowledged = Random(1), 0
    file = os.open(place / "memory", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, len(NUMBERS) * PAGE)
    with Mapping(file, len(NUMBERS) * PAGE, write=True) as memory:
        os.close(file)
        disk = Image(place / "disk", 8192)
        for _ in range(12):
            heard, said = os.pipe()
            child = os.fork()
            if not child:
                try:
                    with Stage(place / "stage", place / "log", [memory], [disk]) as stage:
                        endless(stage, said, memory)
                finally:
                    os._exit(1)
            os.close(said)
            first = os.read(heard, 8)
            time.sleep(chance.random() * 0.02)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            with os.fdopen(heard, "rb") as told:
                acknowledged = int.from_bytes((first + told.read())[-8:], "big")
            with Stage(place / "stage", place / "log", [memory], [disk]) as stage:
                now = stage.committed
                assert now in (acknowledged, acknowledged + 1)
                assert (memory.pages == now).all()
                assert disk.content() == np.full(1024, np.uint64(now)).tobytes()
                assert stage.state() == now.to_bytes(8, "big") * 99
