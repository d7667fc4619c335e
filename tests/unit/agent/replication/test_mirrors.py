"""The logs of a guest's disks: what comes to them, and what waits for them."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.guest_disks import mirrors_left, with_disks
from tests.support.guestless import Qmp
from tests.support.replicas import session
from tests.support.staging import in_memory
from vmckpt.agent.replication import mirrors as replication_mirrors
from vmckpt.agent.replication.mirrors import Mirrors
from vmckpt.replication.disks import mirror_job, resync
from vmckpt.replication.disks.epoch_log import WriteLog
from vmckpt.replication.disks.log_control import Control
from vmckpt.replication.session import Disk, Session
from vmckpt.units import MIB


class World:
    """A guest's QEMU with two disks, and the agent's folder."""

    def __init__(self, folder: Path, qemu: Qmp) -> None:
        self.folder, self.qemu = folder / "agent", qemu
        disks = tuple(
            Disk(target=name, size=2 * MIB, path=str(folder / name), format="raw")
            for name in ("a", "b")
        )
        self.session: Session = session(
            disks=disks, extra={"nodes": {"a": "a", "b": "b"}},
            owner=(os.getuid(), os.getgid()),
        )  # fmt: skip

    def mirrors(self) -> Mirrors:
        return Mirrors(self.session, self.folder, cast("Any", self.qemu), mirror_job.unnoticed)

    def sizes(self, stack: ExitStack) -> list[int]:
        return [log.size() for log in self.logs(stack)]

    def logs(self, stack: ExitStack) -> list[WriteLog]:
        return [
            stack.enter_context(WriteLog(replication_mirrors.place_of(self.folder, number)[0]))
            for number in range(2)
        ]


@pytest.fixture
def one() -> Iterator[World]:
    with in_memory() as folder, with_disks(folder, "a", "b") as qemu:
        made = World(folder, qemu)
        yield made
        replication_mirrors.end_all(made.session, made.folder, cast("Any", qemu))
        assert mirrors_left(qemu) == ()
        assert not resync.place_of(made.folder).exists()


def test_mirrors_bring_nothing_of_what_was_there_before(one: World) -> None:
    assert one.mirrors().begin() is True
    with ExitStack() as stack:
        assert one.sizes(stack) == [0, 0]
    # Another agent finds them at work.
    assert one.mirrors().begin() is False


def test_the_disks_are_read_while_they_are_mirrored(one: World) -> None:
    mirrors = one.mirrors()
    mirrors.begin()
    with mirrors.disks() as disks, ExitStack() as stack:
        contents = [next(iter(disk.read_many([(0, 1)]))).content() for disk in disks]
        assert contents == [b"a", b"b"]
        assert one.sizes(stack) == [0, 0]
    mirror_job.begun(one.qemu, mirror_job.name_of(0))


def test_begun_again_writes_wait_for_room_again(one: World) -> None:
    """To end a mirror none may wait, and that must not last."""
    mirrors = one.mirrors()
    mirrors.begin()
    mirrors.end()
    place, _ = replication_mirrors.place_of(one.folder, 0)
    with Control(place.control) as control:
        assert control.never_wait
        mirrors.begin_again()
        assert not control.never_wait


def test_a_new_agent_takes_away_what_one_left_that_died_while_it_read(one: World) -> None:
    mirrors = one.mirrors()
    mirrors.begin()
    reading = mirrors.disks()
    reading.__enter__()
    assert resync.place_of(one.folder).exists()
    one.mirrors().begin()
    assert not resync.place_of(one.folder).exists()
    assert one.qemu.ask("query-block-exports") == []


def test_at_the_end_nothing_of_it_stays(one: World) -> None:
    mirrors = one.mirrors()
    mirrors.begin()
    reading = mirrors.disks()  # kept, or it would end itself
    reading.__enter__()
    replication_mirrors.end_all(one.session, one.folder, cast("Any", one.qemu))
    assert one.qemu.ask("query-block-exports") == []
    assert mirrors_left(one.qemu) == ()
