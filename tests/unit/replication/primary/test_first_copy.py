"""A standby that is brought up: what it is sent, and what the guest waits for meanwhile."""

from collections.abc import Iterator

import pytest
import zstandard

from tests.support.primaries import DISK, World, world
from tests.support.replicas import until
from vmckpt.replication.control_socket import Request
from vmckpt.replication.disks import mirror_job, resync, write_log
from vmckpt.replication.primary import loop
from vmckpt.replication.protocol.messages import Writes
from vmckpt.units import Seconds

PIECE = resync.PIECE


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_AGAIN", Seconds(0.01))


@pytest.fixture
def one() -> Iterator[World]:
    with world() as made:
        yield made


def sent(one: World) -> list[tuple[int, int]]:
    """Where, and how much, outside of epochs."""
    return [
        (record.offset, record.length)
        for part in one.peer.bulk
        if isinstance(part, Writes)
        for record in write_log.records(zstandard.ZstdDecompressor().decompress(part.data))
    ]


def test_a_standby_that_has_most_of_a_disk_gets_the_rest(one: World) -> None:
    one.disk.content[:] = b"d" * DISK
    one.peer.disk.content[:] = b"d" * DISK
    one.peer.disk.content[PIECE + 9] = 7
    one.peer.disk.content[DISK - 1] = 7
    with one.run():
        one.epochs(1)
        assert one.follows()
    assert sent(one) == [(PIECE, PIECE), (5 * PIECE, 512)]
    told = one.status.as_json()
    assert told["disks_sent_bytes"] == PIECE + 512
    assert told["disks_compared_bytes"] == told["disks_bytes"] == DISK


def test_what_the_guest_writes_while_its_disk_is_read_is_there_in_the_end(one: World) -> None:
    one.disk.content[:] = b"d" * DISK
    read = one.disk.read_many

    def written_behind_it(pieces: object, /) -> Iterator[object]:
        for number, piece in enumerate(read(pieces)):  # type: ignore[arg-type]
            one.disk.write(number * PIECE, b"behind")
            one.disk.write(DISK - 6, b"before")
            yield piece

    one.disk.read_many = written_behind_it  # type: ignore[assignment, method-assign]
    with one.run():
        one.epochs(1)
        assert one.follows()
    assert one.disk.content[:6] == b"behind"


def test_a_standby_that_comes_back_is_sent_only_what_it_lacks(one: World) -> None:
    one.disk.content[:] = b"d" * DISK
    with one.run():
        one.epochs(1)
        one.peer.away = True
        until(lambda: one.says() != "None")
        one.peer.bulk.clear()
        one.peer.stage.start_over()  # as by a new agent that has lost its epochs
        one.disk.write(3, b"new")
        one.peer.away = False
        one.epochs(2)
        assert one.follows()
    assert {at // PIECE for at, _ in sent(one)} == {0}


def test_a_line_that_breaks_before_there_is_a_standby_makes_no_write_wait(one: World) -> None:
    """Nobody reads the log then, and it would fill."""
    one.peer.refuses = "not now"
    with one.run():
        until(lambda: "mirrored no more" in one.events)
        assert mirror_job.name_of(0) not in one.qemu.jobs
        one.disk.content[5:9] = b"here"  # which no log has
        one.peer.refuses = None
        one.epochs(1)
        assert one.follows()
    assert one.since("mirrored no more").index("mirrored anew") >= 0


def test_it_ends_in_the_middle_if_that_is_wished_for(
    one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resync, "_ASKED", 1)
    read = one.disk.read_many

    def wished(pieces: object, /) -> Iterator[object]:
        one.requests.add(Request.END)
        return read(pieces)  # type: ignore[arg-type]

    one.disk.read_many = wished  # type: ignore[assignment, method-assign]
    with one.run():
        until(lambda: bool(one.peer.ends))
    assert one.status.as_json()["disks_compared_bytes"] == PIECE
    assert one.peer.seals == []
    assert "read no more" in one.events
