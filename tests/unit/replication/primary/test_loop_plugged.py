"""Memory that is plugged into a protected guest joins the protection; other devices end it."""

from collections.abc import Iterator

import pytest

from tests.support.primaries import World, world
from tests.support.replicas import GuestMemory, until
from vmckpt.capture.memory.memory_files import MemoryFile
from vmckpt.capture.memory.write_tracking import CannotTrack, Why
from vmckpt.errors import CannotCapture
from vmckpt.replication.control_socket import Request
from vmckpt.replication.primary import loop
from vmckpt.replication.primary.loop import Switched
from vmckpt.replication.protocol.memory_layout import Dimm
from vmckpt.replication.protocol.messages import Pages
from vmckpt.replication.session import ProtectionTerms
from vmckpt.replication.status import Phase
from vmckpt.units import Seconds

HOLDS = ProtectionTerms(interval=Seconds(0.02), automatic=False, hold=Seconds(0.3))
PAGES = 6
DIMM = Dimm(name="dimm0", size=PAGES << 12, node=0, slot=0, address=1 << 32)
ALONE = {"invalidated", "alone", "let all out"}


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(loop, "_AGAIN", Seconds(0.01))
    monkeypatch.setattr(loop, "_DEVICES", Seconds(0.01))
    with world(terms=HOLDS) as made:
        yield made


def plug(one: World) -> None:
    """As QEMU does: at once. What the guest writes there is seen by nobody yet."""
    folder = one.folder / "more"
    folder.mkdir()
    more = GuestMemory(folder, (PAGES,), one.stack)
    one.memory.mapped.append(more.mapped[0])
    one.memory.files.append(MemoryFile(("memdimm0",), PAGES << 12, more.files[0].path))
    more.write(0, 4, 44)
    one.devices.dimms = (DIMM,)
    one.devices.are_same = False


def test_new_memory_joins_and_the_standby_is_never_invalid(one: World) -> None:
    with one.run():
        one.epochs(2)
        begun = len(one.events)
        plug(one)
        until(lambda: one.devices.are_same)
        one.epochs(2)
        one.memory.write(2, 5, 5)
        one.epochs(2)
        assert one.follows()
        assert one.phase() == Phase.PROTECTING
    assert not ALONE & {*one.events[begun:-3]}
    (layout,) = [told for told in one.peer.layouts if told.dimms]
    assert layout.dimms == (DIMM,)
    assert [name for name, _ in layout.blocks] == ["ram0", "ram1", "memdimm0"]
    assert len(one.peer.hellos) == 1


def test_an_epoch_in_which_memory_came_is_not_committed_without_it(one: World) -> None:
    """Its device state says that the memory is there."""
    sealed: list[int] = []

    def work(count: int) -> None:
        if count == 3:
            one.memory.write(0, 7, 7)
            plug(one)
            sealed.append(len(one.peer.seals))

    one.capturer.before = work
    with one.run():
        until(lambda: bool(one.peer.layouts) and bool(one.peer.layouts[-1].dimms))
        assert len(one.peer.seals) == sealed[0]
        one.epochs(2)
        assert one.follows()
    assert 3 not in {seal.epoch for seal in one.peer.seals}


def test_memory_that_comes_while_the_backup_is_away_joins_once_it_is_back(one: World) -> None:
    with one.run():
        one.epochs(1)
        one.peer.away = True
        until(lambda: one.lease_holder.line is None)
        plug(one)
        one.requests.wait(Seconds(0.05))
        one.peer.away = False
        one.epochs(2)
        assert one.follows()
        assert one.phase() == Phase.PROTECTING
    assert "plugged or unplugged" not in one.says()


def test_memory_that_came_during_the_first_copy_is_in_it(one: World) -> None:
    def read() -> None:
        if "read" in one.events and one.devices.are_same and not one.peer.layouts[-1].dimms:
            plug(one)
            one.devices.on_look = lambda: None

    one.devices.on_look = read
    with one.run():
        one.epochs(1)
        assert one.follows()
    assert [len(told.blocks) for told in one.peer.layouts] == [2, 3]
    assert any(isinstance(part, Pages) and part.file == 2 for part in one.peer.bulk)


def test_a_backup_without_room_leaves_the_guest_unprotected_until_it_has(one: World) -> None:
    with one.run():
        one.epochs(1)
        one.peer.has_no_room = True
        plug(one)
        until(lambda: one.phase() == Phase.ALONE)
        until(lambda: "it has no room" in one.says())
        assert not one.devices.are_same
        one.peer.has_no_room = False
        one.epochs(2)
        assert one.phase() == Phase.PROTECTING
        assert one.follows()


@pytest.mark.parametrize("why", [CannotTrack(7, Why.CONFLICT), CannotCapture("it is private"),
                                 OSError(28, "No space left on device")])  # fmt: skip
def test_memory_that_cannot_be_read_leaves_the_guest_unprotected(
    one: World, monkeypatch: pytest.MonkeyPatch, why: Exception
) -> None:
    def fail(_: object) -> None:
        raise why

    with one.run():
        one.epochs(1)
        monkeypatch.setattr(type(one.parts["memory"]), "include", lambda *_: fail(_))
        plug(one)
        until(lambda: "memory was plugged in" in one.says())
        until(lambda: one.phase() == Phase.ALONE)
        assert str(why) in one.says()
        assert "run vmckpt unprotect GUEST, then vmckpt protect GUEST" in one.says()
    assert one.raised is None


def test_a_planned_switch_takes_the_new_memory_along(one: World) -> None:
    def work(_: int) -> None:
        if one.requests.has(Request.PLANNED) and one.devices.are_same and not one.devices.dimms:
            one.capturer.before = lambda _: None
            plug(one)

    with one.run():
        one.epochs(1)
        one.capturer.before = work
        one.requests.add(Request.PLANNED)
        assert isinstance(one.ended(), Switched)
        until(lambda: bool(one.peer.ends))
        assert one.follows()
    assert one.peer.seals[-1].final
    assert "go on" in one.since("switching")
