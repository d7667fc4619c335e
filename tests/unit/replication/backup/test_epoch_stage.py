"""The backup's end of an epoch: in order, checked, and nothing of one that was not sealed."""

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.staging import (
    DISKS,
    EMPTY,
    Disk,
    Epoch,
    Ram,
    Standby,
    Steps,
    epoch,
    in_memory,
    packed,
    redo_disks,
    restarted,
    run,
    seal,
    send,
    stepping,
)
from vmckpt.replication.backup import redo_log
from vmckpt.replication.backup.epoch_stage import LARGEST_WRITES, WRITES, Stage
from vmckpt.replication.backup.redo_log import BODY, StageDamaged, StageError, StageFull
from vmckpt.replication.disks import write_log
from vmckpt.replication.protocol import page_codec
from vmckpt.replication.protocol.messages import (
    Damaged,
    DeviceState,
    OutOfOrder,
    Pages,
    Replayed,
    WireError,
    Writes,
)

FIRST = epoch(1, EMPTY)
SECOND = epoch(2, FIRST.after)
THIRD = epoch(3, SECOND.after)
QUIET = Epoch(
    number=2,
    parts=(
        state := DeviceState(epoch=2, data=page_codec.encode_state(b"quiet", FIRST.after.state)),
    ),
    seal=seal(2, 1, [state]),
    after=replace(FIRST.after, state=b"quiet"),
)
"""An epoch in which the guest did nothing."""
BROKEN = (Damaged, OutOfOrder, Replayed)


@pytest.fixture
def place() -> Iterator[Path]:
    with in_memory() as folder:
        yield folder


@pytest.fixture
def standby(place: Path) -> Standby:
    return Standby(place, place)


def test_epochs_reach_memory_disks_and_device_state(standby: Standby) -> None:
    with standby.stage() as stage:
        assert (stage.committed, stage.last) == (0, None)
        for one in (FIRST, SECOND, THIRD):
            before = standby.memory[0].content.tobytes()
            send(stage, one)
            assert stage.committed == one.number
            assert standby.memory[0].content.tobytes() == before
            assert not stage.applied
            stage.apply()
            assert standby.world(stage) == one.after
        assert stage.last is not None
        assert (stage.last.taken, stage.last.final) == (1.5, False)
    assert restarted(standby) == (3, THIRD.after)
    assert [disk.durable for disk in standby.disks] == list(THIRD.after.disks)


def test_an_epochs_writes_are_on_the_disk_before_its_record_says_so(
    standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The primary lets the guest's output out once it is committed, and the power may go then."""
    steps: list[str] = []
    publish = redo_log.publish

    def synced(file: int) -> None:
        steps.append(f"{Path(f'/proc/self/fd/{file}').readlink().name} on disk")

    def published(record: redo_log.Record, path: Path) -> None:
        steps.append(f"epoch {record.epoch} committed")
        publish(record, path)

    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(redo_log, "publish", published)
    with standby.stage() as stage:
        for one in (FIRST, SECOND):
            steps.clear()
            run(stage, one)
            assert steps == [f"{WRITES} on disk", f"epoch {one.number} committed"]


def test_who_copies_the_standby_is_told_what_an_epoch_changed_once_it_has(
    standby: Standby,
) -> None:
    told: dict[int, set[int]] = {0: set(), 1: set()}

    def note(file: int, numbers: NDArray[np.int64]) -> None:
        for number in numbers.tolist():
            after = SECOND.after.pages(file)[number].tolist()
            assert standby.memory[file].content[number].tolist() == after
            told[file].add(number)

    with standby.stage() as stage:
        run(stage, FIRST)
        stage.noted = note
        run(stage, SECOND)
        changed = {
            file: set(
                np.flatnonzero(
                    (FIRST.after.pages(file) != SECOND.after.pages(file)).any(axis=1)
                ).tolist()
            )
            for file in told
        }
        assert all(changed[file] <= told[file] for file in told)
        assert changed != {0: set(), 1: set()}
        # What comes anew is written without a word.
        stage.start_over()
        assert stage.noted is None


def test_an_epoch_in_which_nothing_happened_needs_no_disk(standby: Standby) -> None:
    with standby.stage() as stage:
        run(stage, FIRST)
        steps = Steps()
        with stepping(steps):
            standby.watch(steps)
            written = (standby.log / WRITES).stat().st_mtime_ns
            run(stage, QUIET)
        assert standby.world(stage) == QUIET.after
        # The state, the new record, its rename, the mark that it is applied.
        assert steps.taken == 4
    assert (standby.log / WRITES).stat().st_mtime_ns == written


def test_the_first_copy_is_applied_at_once_and_commits_nothing(standby: Standby) -> None:
    bulk = [replace(part, epoch=0) for part in FIRST.parts if not isinstance(part, DeviceState)]
    with standby.stage() as stage:
        for part in bulk:
            stage.bulk(part)
        assert stage.committed == 0
        assert standby.world(stage) == replace(FIRST.after, state=b"")
        with pytest.raises(StageError, match="no device state"):
            stage.state()
        assert {disk.durable for disk in standby.disks} == {bytes(size) for size in DISKS}
        only = DeviceState(epoch=1, data=page_codec.encode_state(b"one", None))
        stage.take(only)
        stage.seal(seal(1, 0, [only]))
        # It was never flushed; the first epoch would be worth nothing without it.
        assert [disk.durable for disk in standby.disks] == list(FIRST.after.disks)
        stage.apply()
        with pytest.raises(Replayed):
            stage.bulk(bulk[0])
        stage.start_over()
        stage.bulk(bulk[0])
    assert restarted(standby)[0] == 0


@pytest.mark.parametrize("state_too", [False, True])
def test_a_first_copy_and_an_epoch_are_not_mixed(standby: Standby, state_too: bool) -> None:
    zero = replace(FIRST.parts[-1 if state_too else 0], epoch=0)
    with standby.stage() as stage:
        with pytest.raises(OutOfOrder):
            stage.take(zero)
        stage.take(FIRST.parts[0])
        with pytest.raises(OutOfOrder):
            stage.bulk(zero)
        with pytest.raises(OutOfOrder):
            stage.seal(FIRST.seal)
        with pytest.raises(OutOfOrder):
            stage.bulk(FIRST.parts[0])
        run(stage, FIRST)


def test_nothing_is_taken_before_the_last_epoch_is_applied(standby: Standby) -> None:
    with standby.stage() as stage:
        send(stage, FIRST)
        for call in (lambda: stage.take(SECOND.parts[0]), lambda: stage.seal(SECOND.seal),
                     lambda: stage.bulk(SECOND.parts[0])):  # fmt: skip
            with pytest.raises(ValueError, match="not applied yet"):
                call()
        stage.apply()
        stage.apply()
        run(stage, SECOND)
        assert standby.world(stage) == SECOND.after


WRONG: dict[str, Callable[[Stage], object]] = {
    "an epoch again": lambda stage: send(stage, FIRST),
    "a seal again": lambda stage: stage.seal(FIRST.seal),
    "one too far": lambda stage: send(stage, epoch(3, FIRST.after)),
    "another base": lambda stage: send(stage, epoch(2, FIRST.after, base=0)),
    "nothing but a seal": lambda stage: stage.seal(SECOND.seal),
    "a part too few": lambda stage: send(stage, replace(SECOND, parts=SECOND.parts[1:])),
    "a part too many": lambda stage: send(
        stage, replace(SECOND, parts=(SECOND.parts[0], *SECOND.parts))
    ),
    "no device state": lambda stage: send(
        stage,
        replace(SECOND, parts=SECOND.parts[:-1], seal=seal(2, 1, list(SECOND.parts[:-1]))),
    ),
    "two device states": lambda stage: send(
        stage, replace(SECOND, parts=(*SECOND.parts, SECOND.parts[-1]))
    ),
    "an empty epoch": lambda stage: stage.seal(seal(2, 1, [])),
    "a file too far": lambda stage: stage.take(Pages(epoch=2, file=2, data=b"")),
    "a page too far": lambda stage: stage.take(
        Pages(
            epoch=2, file=1,
            data=page_codec.encode(np.array([5]), np.ones((1, 512), np.uint64), None),
        )
    ),
    "a disk too far": lambda stage: stage.take(Writes(epoch=2, disk=2, data=packed(b""))),
    "a write too far": lambda stage: stage.take(
        Writes(epoch=2, disk=1, data=packed(write_log.header(DISKS[1] - 512, 513, write_log.ZEROS)))
    ),
    "half a write": lambda stage: stage.take(
        Writes(epoch=2, disk=1, data=packed(write_log.header(0, 512) + bytes(511)))
    ),
    "no zstd": lambda stage: stage.take(Writes(epoch=2, disk=0, data=b"nothing")),
    "something behind it": lambda stage: stage.take(
        Writes(epoch=2, disk=0, data=packed(write_log.header(0, 512, write_log.TRIM)) + b".")
    ),
    "a bomb": lambda stage: stage.take(
        Writes(epoch=2, disk=0, data=packed(bytes(LARGEST_WRITES + 1)))
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_refused_and_spoils_nothing(standby: Standby, wrong: str) -> None:
    with standby.stage() as stage:
        run(stage, FIRST)
        for part in SECOND.parts[:-2]:
            stage.take(part)
        with pytest.raises(BROKEN):
            WRONG[wrong](stage)
        assert (stage.committed, standby.world(stage)) == (1, FIRST.after)
        with pytest.raises(WireError):  # what was kept of the epoch is forgotten
            stage.seal(SECOND.seal)
        run(stage, SECOND, THIRD)
        assert standby.world(stage) == THIRD.after


def test_an_epoch_that_was_not_sealed_is_forgotten(standby: Standby) -> None:
    with standby.stage() as stage:
        run(stage, FIRST)
        for part in SECOND.parts:
            stage.take(part)
        stage.discard()
        with pytest.raises(OutOfOrder):
            stage.seal(SECOND.seal)
        for part in SECOND.parts:
            stage.take(part)
    assert restarted(standby) == (1, FIRST.after)
    other = epoch(4, FIRST.after, base=1)
    with standby.stage() as stage:
        for part in SECOND.parts[:3]:
            stage.take(part)
        send(stage, other)  # a newer one forgets it as well
        stage.apply()
        assert standby.world(stage) == other.after


def test_a_disk_that_is_really_full_is_named(standby: Standby) -> None:
    with standby.stage() as stage:
        run(stage, FIRST)
        os.close(stage._pages.file)
        stage._pages.file = os.open("/dev/full", os.O_RDWR)
        with pytest.raises(StageFull, match=r"staging epoch 2: No space left.*free some space"):
            send(stage, SECOND)
        assert (stage.committed, standby.world(stage)) == (1, FIRST.after)


def test_one_agent_at_a_time(standby: Standby) -> None:
    with standby.stage() as stage:
        with pytest.raises(StageError, match="another agent is using this guest's standby"):
            standby.stage()
        run(stage, FIRST)
    assert restarted(standby) == (1, FIRST.after)


def test_memory_that_was_plugged_in_leaves_the_committed_epoch_valid(standby: Standby) -> None:
    with standby.stage() as stage:
        run(stage, FIRST)
        stage.take(SECOND.parts[0])
        stage.noted = lambda *_: None
        standby.memory.append(Ram(np.zeros((3, 512), dtype=np.uint64)))
        stage.use(standby.memory)
        assert vars(stage)["noted"] is None, "who copies the standby lacks the new memory"
        assert stage.committed == 1
        with pytest.raises(WireError):  # its first part is gone
            stage.seal(SECOND.seal)
    with standby.stage() as stage:  # a later agent, which finds all memory
        assert (stage.committed, stage.applied) == (1, True)
        assert stage.state() == FIRST.after.state
        pages = page_codec.encode(np.array([2]), np.full((1, 512), 7, dtype=np.uint64), None)
        parts = [Pages(epoch=2, file=2, data=pages), *SECOND.parts]
        for part in parts:
            stage.take(part)
        stage.seal(seal(2, 1, parts))
        stage.apply()
        assert standby.memory[2].content[2].tolist() == [7] * 512
    standby.memory.pop()
    with standby.stage() as stage:
        assert stage.committed == 0, "another standby"


def test_memory_that_was_plugged_in_before_any_epoch_changes_nothing(standby: Standby) -> None:
    with standby.stage() as stage:
        standby.memory.append(Ram(np.zeros((3, 512), dtype=np.uint64)))
        stage.use(standby.memory)
        assert stage.committed == 0
        run(stage, FIRST)
        assert stage.committed == 1


def test_another_standby_begins_with_nothing(standby: Standby) -> None:
    with standby.stage() as stage:
        run(stage, FIRST)
        send(stage, SECOND)
    places = standby.folder, standby.log, standby.memory
    before = standby.world(stage)
    with Stage(*places, standby.disks, standby="qemu 7") as stage:
        assert (stage.committed, stage.applied) == (0, True)
        assert standby.world(stage).memory == before.memory
    # Nor is the first one's epoch good for anything any more: the other may have changed it.
    assert restarted(standby)[0] == 0
    with standby.stage() as stage:
        run(stage, FIRST)
    with Stage(*places, [*standby.disks, Disk(bytearray(512))]) as stage:
        assert stage.committed == 0


SPOILED: dict[str, Callable[[Standby], object]] = {
    "a page": lambda standby: flip(standby.folder / "pages", 300),
    "the device state": lambda standby: flip(standby.folder / "state-1", 3),
    "a disk write": lambda standby: flip(standby.log / WRITES, BODY + 40),
    "the log's head": lambda standby: flip(standby.log / WRITES, 8),
    "the record": lambda standby: flip(standby.folder / "committed", 1),
    "the record's first byte": lambda standby: flip(standby.folder / "committed", 0),
    "the pages cut": lambda standby: os.truncate(standby.folder / "pages", 5000),
    "the log gone": lambda standby: (standby.log / WRITES).unlink(),
    "the record empty": lambda standby: os.truncate(standby.folder / "committed", 0),
    "the record another": lambda standby: (standby.folder / "committed").write_text("P[1]"),
}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("spoiled", SPOILED)
def test_what_was_spoiled_since_is_never_applied(standby: Standby, spoiled: str) -> None:
    with standby.stage() as stage:
        run(stage, FIRST)
        send(stage, SECOND)
    SPOILED[spoiled](standby)
    for _ in range(2):
        with pytest.raises(StageDamaged, match="is damaged; run vmckpt unprotect GUEST, then"):
            standby.stage()
    assert standby.memory[0].content.tobytes() == FIRST.after.memory[0]
    assert bytes(standby.disks[0].content) == FIRST.after.disks[0]


def test_of_disks_that_were_still_being_copied_nothing_is_said(standby: Standby) -> None:
    zero = [replace(part, epoch=0) for part in FIRST.parts if isinstance(part, Writes)]
    with standby.stage() as stage:
        stage.bulk(zero[0])
        assert not redo_disks(standby.log / WRITES, standby.disks)
        only = DeviceState(epoch=1, data=page_codec.encode_state(b"one", None))
        send(stage, Epoch(number=1, parts=(only,), seal=seal(1, 0, [only]), after=EMPTY))
        assert redo_disks(standby.log / WRITES, standby.disks)
        stage.start_over()
        run(stage, FIRST, QUIET)
        assert redo_disks(standby.log / WRITES, standby.disks)
        stage.start_over()
        stage.bulk(zero[0])
        assert not redo_disks(standby.log / WRITES, standby.disks)


def test_after_a_commit_that_failed_the_disks_are_whole_still(
    standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "no")

    with standby.stage() as stage:
        run(stage, FIRST)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", refuse)
            with pytest.raises(StageError, match="committing epoch 2"):
                send(stage, SECOND)
        stage.take(SECOND.parts[0])
        assert redo_disks(standby.log / WRITES, standby.disks)
        assert standby.world(stage) == FIRST.after


def test_what_the_system_takes_in_small_pieces_is_whole(
    standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: real(file, data[:1000], at))
    with standby.stage() as stage:
        run(stage, FIRST)
        send(stage, SECOND)
    assert restarted(standby) == (2, SECOND.after)


def test_a_planned_switch_is_known_as_one(standby: Standby) -> None:
    with standby.stage() as stage:
        send(stage, replace(FIRST, seal=seal(1, 0, list(FIRST.parts), final=True)))
    with standby.stage() as stage:
        assert stage.last is not None
        assert stage.last.final
