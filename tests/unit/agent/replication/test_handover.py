"""How a guest that stands still is given away: over a real line, with a QEMU that is none."""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.replicas import Ends, session, two_ends, until
from vmckpt.agent.replication import handover, teardown
from vmckpt.errors import HypervisorError, RemoteError
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.replication.protocol.connection import PeerConnection
from vmckpt.replication.protocol.messages import End
from vmckpt.replication.session import Session
from vmckpt.units import Seconds


@dataclass
class Qemu:
    """A process that libvirt knows."""

    lives: bool = True
    events: list[str] = field(default_factory=list)
    when_it_ends: Callable[[], None] = lambda: None

    def hold(self, _: str) -> HeldProcess | None:
        return HeldProcess(os.getpid()) if self.lives else None

    def kill(self, process: HeldProcess) -> None:
        assert process.pid == os.getpid()
        self.lives = False
        self.events.append("killed")
        self.when_it_ends()

    def noted(self, *_: object) -> None:
        self.events.append("libvirt is done")


@dataclass
class One:
    """The source's end of a line, and the target's."""

    folder: Path
    ends: Ends
    near: PeerConnection
    far: PeerConnection
    qemu: Qemu

    def give(self, told: Session, lease_holder: object = None) -> None:
        with HeldProcess(os.getpid()) as process:
            handover.hand_over(
                told, self.folder, self.near, lease_holder=cast("Any", lease_holder),
                process=process, stopped=time.monotonic() - 0.5,
            )  # fmt: skip


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[One]:
    with two_ends() as ends, ExitStack() as stack:
        qemu = Qemu()
        monkeypatch.setattr(identity, "hold", qemu.hold)
        monkeypatch.setattr(teardown, "kill", qemu.kill)
        monkeypatch.setattr(handover, "_wait_for_libvirt", qemu.noted)
        near, far = ends.lines(stack)
        yield One(folder=ends.primary, ends=ends, near=near, far=far, qemu=qemu)


MOVES = session(moves=True, disks=())


def test_a_guest_that_moves_is_noted_as_given_before_anybody_is_told(one: One) -> None:
    noted: list[object] = []

    def target() -> None:
        while not isinstance(one.far.receive(Seconds(0.05)), End):
            pass
        noted.append(handover.handover_record(one.folder))
        noted.append(one.qemu.lives)
        one.far.send(End(why="the guest is running on the backup"))

    thread = threading.Thread(target=target)
    thread.start()
    one.give(MOVES)
    thread.join(5.0)
    told, stood = noted
    assert told is not None
    assert stood is True
    assert 0.5 <= cast("dict[str, float]", told)["stood_s"] < 5.0
    assert one.qemu.events == ["killed", "libvirt is done"]


def test_without_a_word_that_it_runs_there_its_qemu_is_left_standing(
    one: One, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target may not have been able to take it."""
    monkeypatch.setattr(handover, "_ARRIVES", Seconds(0.2))
    one.far.close()
    one.give(MOVES)
    assert handover.handover_record(one.folder) is not None
    assert one.qemu.events == []


def test_nobody_waits_for_ever_for_that_word(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_ARRIVES", Seconds(0.1))
    one.give(MOVES)
    assert handover.handover_record(one.folder) is not None
    assert one.qemu.lives


def test_what_cannot_be_noted_is_not_given_away(one: One) -> None:
    (one.folder / "given.json.new").mkdir()
    with pytest.raises(OSError, match="given"):
        one.give(MOVES)
    assert handover.handover_record(one.folder) is None
    assert not isinstance(one.far.receive(Seconds(0.1)), End)


def test_a_protected_guest_s_qemu_ends_before_the_backup_is_told(
    one: One, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        teardown, "give_away", lambda *_: one.qemu.events.append("given away by its lease")
    )
    one.give(session())
    assert one.qemu.events == ["given away by its lease"]
    assert one.far.receive(Seconds(5.0)) == End(why="switched")
    assert handover.handover_record(one.folder) is None


def test_images_that_both_hosts_see_keep_their_owner_when_libvirt_ends_the_guest(
    one: One, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libvirt gives the images of a guest that has ended to root; on the target they are in use."""
    image, missing = tmp_path / "web1.raw", tmp_path / "gone.raw"
    image.touch()
    os.chown(image, 4242, 4343)
    told = session(moves=True, disks=(), extra={"shared": [str(image), str(missing)]})
    monkeypatch.setattr(handover, "_ARRIVES", Seconds(0.1))
    one.give(told)
    assert owner(image) == (4242, 4343)  # nobody has changed it
    os.chown(image, 0, 0)
    handover.finish(told, one.folder)
    assert owner(image) == (4242, 4343)
    # Another file is in its place: only the one that was given away is meant.
    image.rename(tmp_path / "kept")
    image.touch()
    handover.finish(told, one.folder)
    assert owner(image) == (0, 0)
    image.unlink()
    image.symlink_to(tmp_path / "kept")
    os.chown(tmp_path / "kept", 0, 0)
    os.lchown(image, 4242, 4343)
    handover.finish(told, one.folder)
    assert owner(tmp_path / "kept") == (0, 0)


def owner(path: Path) -> tuple[int, int]:
    seen = path.stat()
    return seen.st_uid, seen.st_gid


def test_what_was_given_away_can_be_taken_back(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_ARRIVES", Seconds(0.1))
    one.give(MOVES)
    handover.revert(one.folder)
    assert handover.handover_record(one.folder) is None
    handover.revert(one.folder)
    assert one.qemu.lives


def test_no_agent_begins_while_its_side_is_ended(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_LOCKS", Seconds(0.1))
    with (one.folder / handover.AGENT_LOCK).open("w") as agent:
        fcntl.flock(agent, fcntl.LOCK_EX)
        with (
            pytest.raises(RemoteError, match="does not stop"),
            handover.without_agent(MOVES, one.folder),
        ):
            pass
    with (
        handover.without_agent(MOVES, one.folder),
        (one.folder / handover.AGENT_LOCK).open("w") as agent,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(agent, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(("code", "ends"), [(42, True), (1, False)])
def test_libvirt_is_waited_for_until_it_knows_no_such_guest(
    monkeypatch: pytest.MonkeyPatch, code: int, ends: bool
) -> None:
    class Gone:
        def __init__(self, *_: object, **__: object) -> None:
            raise HypervisorError("no such guest", host="alpha", code=code)

    monkeypatch.setattr(handover, "QmpMonitor", Gone)
    if ends:
        handover._wait_for_libvirt(MOVES)
    else:
        with pytest.raises(HypervisorError):
            handover._wait_for_libvirt(MOVES)


def test_what_was_not_heard_is_said_again_without_a_hello(one: One) -> None:
    """A hello would say that the guest may go on here."""
    heard: list[object] = []
    told = replace(MOVES, port=one.ends.port)

    def target() -> None:
        made = one.ends.accept()
        assert made is not None
        with PeerConnection(made, lambda: 1) as line:
            while (found := line.receive(Seconds(0.1))) is None:
                pass
            heard.append(found)
            line.send(End(why="the guest is running on the backup"))
            until(lambda: "killed" in one.qemu.events)

    one.far.close()
    thread = threading.Thread(target=target)
    thread.start()
    one.give(told)
    thread.join(5.0)
    assert heard == [End(why="switched")]
    assert one.qemu.events == ["killed", "libvirt is done"]


def test_an_agent_after_the_one_that_gave_it_away_says_so_once_more(
    one: One, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_ARRIVES", Seconds(0.2))
    one.far.close()
    told = replace(MOVES, port=one.ends.port)
    one.give(told)
    assert one.qemu.lives
    monkeypatch.setattr(handover, "_ARRIVES", Seconds(5.0))

    def target() -> None:
        while (made := one.ends.accept()) is None:
            pass
        with PeerConnection(made, lambda: 1) as line:
            until(lambda: isinstance(line.receive(Seconds(0.1)), End))
            line.send(End(why="the guest is running on the backup"))
            until(lambda: not one.qemu.lives)

    thread = threading.Thread(target=target)
    thread.start()
    handover.resend(told, one.folder)
    thread.join(5.0)
    assert one.qemu.events == ["killed", "libvirt is done"]
