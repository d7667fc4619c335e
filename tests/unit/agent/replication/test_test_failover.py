"""A test of a standby beside a backup at work: no QEMU, but a real loop, stage and line."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.support.backing import ONE, TWO, Following, commit, following
from tests.support.replicas import session, until
from tests.support.staging import PAGES, World, epoch
from vmckpt.agent.replication import test_failover, test_failover_files
from vmckpt.agent.replication.test_failover import Trials
from vmckpt.errors import BadInput, GuestLocked, HypervisorError
from vmckpt.replication.backup import standby as standbys
from vmckpt.replication.control_socket import Request
from vmckpt.replication.test_failover import disk_copy, memory_copy
from vmckpt.replication.test_failover.memory_check import Room
from vmckpt.replication.test_failover.memory_copy import Next
from vmckpt.units import GIB, Bytes

PLENTY = Room(wanted=Bytes(GIB), shared=Bytes(9 * GIB), memory=Bytes(9 * GIB), disks=None)


class Second:
    """The QEMU of the copy."""

    def __init__(self) -> None:
        self.memory = [
            SimpleNamespace(
                pages=np.full((count, 512), 3, dtype=np.uint64), size=4096 * count, file=-1
            )
            for count in PAGES
        ]
        self.state: bytes | None = None
        self.unplugged: list[str] = []
        self.runs = False
        self.dead = False
        self.fails: str | None = None

    def __enter__(self) -> "Second":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def load(self, state: bytes) -> None:
        if self.fails is not None:
            raise HypervisorError(self.fails, host="beta")
        self.state = state


class Scene:
    """A backup, its tests, and what they do outside."""

    def __init__(self, one: Following, folder: Path) -> None:
        self.one, self.second = one, Second()
        self.standby = SimpleNamespace(
            memory=[
                SimpleNamespace(pages=ram.content, size=ram.content.nbytes)
                for ram in one.standby.memory
            ],
            nodes=[],
        )
        self.session = session(role="backup", disks=(), state=str(folder / "state"), host="beta")
        self.trials = Trials(self.session, folder, one.stage, cast("Any", self.standby))
        self.room = PLENTY
        self.cleared = 0
        self.fleeced: World | None = None
        """What the standby was when its disks were fleeced."""

    def told(self) -> Mapping[str, Any]:
        found = self.trials.as_json()
        assert found is not None
        return found

    def copied(self) -> tuple[bytes, ...]:
        return tuple(one.pages.tobytes() for one in self.second.memory)

    # What stands for libvirt and QEMU.

    def make(self, trial: Any) -> Any:
        def made(monitor: object) -> tuple[()]:
            del monitor
            trial._told["name"] = "web1-test"
            return ()

        return made

    def fleece(self, monitor: object, fleeces: object) -> None:
        del monitor, fleeces
        self.fleeced = self.one.standby.world(self.one.stage)

    def watch(self, trial: Any) -> None:
        while not trial._stop.wait(0.002):
            if self.second.dead:
                return

    def clear(self, told: object) -> None:
        assert told is self.session
        self.cleared += 1


@contextmanager
def _monitor(scene: Scene) -> Iterator[Any]:
    yield SimpleNamespace(
        cards=lambda: ["net0", "net1"],
        tell=lambda command, told: scene.second.unplugged.append(f"{command} {told['name']}"),
    )


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Scene]:
    with following(monkeypatch) as one:
        made = Scene(one, tmp_path)
        made.one.standstill = made.trials._standstill
        monkeypatch.setattr(test_failover, "QmpMonitor", lambda *_, **__: _monitor(made))
        monkeypatch.setattr(test_failover, "Standby", lambda *_, **__: made.second)
        monkeypatch.setattr(test_failover, "_room", lambda *_: made.room)
        monkeypatch.setattr(disk_copy, "start_copies", made.fleece)
        monkeypatch.setattr(test_failover_files, "clear", made.clear)
        monkeypatch.setattr(test_failover._Trial, "_make", lambda self, m: made.make(self)(m))
        monkeypatch.setattr(test_failover._Trial, "_watch", lambda self: made.watch(self))  # noqa: PLW0108 - it must be bound

        def go_on(monitor: object) -> None:
            del monitor
            made.second.runs = True

        monkeypatch.setattr(standbys, "go_on", go_on)
        yield made
        made.trials.close()


def test_a_copy_is_of_one_epoch_while_others_are_committed(scene: Scene) -> None:
    scene.one.begin()
    line, _ = scene.one.hello()
    commit(line, ONE)
    last = ONE
    worlds = {1: ONE.after}
    for _ in range(8):
        scene.second = Second()
        scene.trials.begin()
        while scene.told()["state"] == "copying":
            last = epoch(last.number + 1, last.after)
            worlds[last.number] = last.after
            commit(line, last)
        told = scene.told()
        assert (told["state"], told["name"], told["why"]) == ("runs", "web1-test", None)
        world = worlds[told["epoch"]]
        assert scene.copied() == world.memory
        assert scene.second.state == world.state
        assert scene.fleeced == world
        assert scene.second.unplugged[-2:] == ["set_link net0", "set_link net1"]
        # The protection goes on, and the copy stays what it is.
        last = epoch(last.number + 1, last.after)
        worlds[last.number] = last.after
        commit(line, last)
        assert scene.copied() == world.memory
        assert scene.one.stage.noted is None
        scene.trials.end()
        until(lambda: scene.trials.as_json() is None)
    assert scene.cleared == 16
    scene.one.requests.add(Request.END)
    scene.one.came()
    assert scene.one.world() == last.after


def test_what_cannot_be_is_refused_in_one_line(scene: Scene) -> None:
    scene.one.begin()
    line, _ = scene.one.hello()
    with pytest.raises(GuestLocked, match="of web1 on beta has no complete epoch yet"):
        scene.trials.begin()
    commit(line, ONE)
    scene.room = Room(wanted=Bytes(GIB), shared=Bytes(GIB), memory=Bytes(9 * GIB), disks=None)
    with pytest.raises(BadInput, match="on the tmpfs for memory"):
        scene.trials.begin()
    with pytest.raises(BadInput, match="no failover test of web1 is running"):
        scene.trials.end()
    scene.room = PLENTY
    scene.trials.begin()
    with pytest.raises(GuestLocked, match="is already running; end it first"):
        scene.trials.begin()
    scene.trials.no_more()
    scene.trials.close()
    assert scene.trials.as_json() is None
    with pytest.raises(GuestLocked, match="its standby is taking over"):
        scene.trials.begin()


def test_a_first_copy_that_begins_anew_fails_the_test_and_nothing_else(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.one.begin()
    line, _ = scene.one.hello()
    commit(line, ONE)
    copying, go_on = threading.Event(), threading.Event()
    real = memory_copy.copy

    def slow(*arguments: Any) -> None:
        copying.set()
        assert go_on.wait(5.0)
        real(*arguments)

    monkeypatch.setattr(memory_copy, "copy", slow)
    scene.trials.begin()
    assert copying.wait(5.0)
    line.close()
    line, welcome = scene.one.hello(captured=0)
    assert welcome.committed == 0
    commit(line, ONE, TWO)
    go_on.set()
    until(lambda: scene.told()["state"] == "failed")
    assert "is receiving a full copy of web1" in scene.told()["why"]
    until(lambda: scene.cleared == 2)
    assert not scene.second.runs
    # It is known until somebody has taken note of it, or tries again.
    until(lambda: not cast("threading.Thread", scene.trials._thread).is_alive())
    scene.trials.end()
    assert scene.trials.as_json() is None


def test_a_copy_that_does_not_start_says_why_and_is_taken_away(scene: Scene) -> None:
    scene.second.fails = "beta: did not load the device state"
    scene.one.begin()
    line, _ = scene.one.hello()
    commit(line, ONE)
    scene.trials.begin()
    until(lambda: scene.told()["state"] == "failed" and scene.cleared == 2)
    assert "did not load the device state" in scene.told()["why"]
    scene.second.fails = None
    scene.trials.begin()
    until(lambda: scene.told()["state"] == "runs")
    commit(line, TWO)


def test_a_copy_that_somebody_destroys_is_tidied(scene: Scene) -> None:
    scene.one.begin()
    line, _ = scene.one.hello()
    commit(line, ONE)
    scene.trials.begin()
    until(lambda: scene.told()["state"] == "runs")
    scene.second.dead = True
    until(lambda: scene.trials.as_json() is None)
    assert scene.cleared == 2


def test_a_guest_that_writes_too_fast_is_said_to(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_copy, "decide", lambda left, rounds: Next.GIVE_UP)
    scene.one.begin()
    line, _ = scene.one.hello()
    commit(line, ONE)
    scene.trials.begin()
    until(lambda: scene.told()["state"] == "failed")
    assert "faster than it can be copied" in scene.told()["why"]
    commit(line, TWO)


def test_the_loop_that_has_ended_is_not_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, go_on = threading.Event(), threading.Event()
    real = memory_copy.copy

    def slow(*arguments: Any) -> None:
        copying.set()
        assert go_on.wait(5.0)
        real(*arguments)

    monkeypatch.setattr(memory_copy, "copy", slow)
    scene.one.begin()
    line, _ = scene.one.hello()
    commit(line, ONE)
    scene.trials.begin()
    assert copying.wait(5.0)
    began = time.monotonic()
    scene.trials.no_more()
    assert time.monotonic() - began < 1.0
    go_on.set()
    scene.trials.close()
    assert scene.fleeced is None
    assert not scene.second.runs


def test_the_name_is_one_that_nobody_has() -> None:
    taken = frozenset({"web1", "web1-test", "web1-test2"})
    assert test_failover._free_name("web1", frozenset()) == "web1-test"
    assert test_failover._free_name("web1", taken) == "web1-test3"


def test_what_memory_is_free_is_read_from_the_kernel() -> None:
    assert test_failover._available("MemTotal: 9 kB\nMemAvailable:   2048 kB\n") == 2 << 20
    assert test_failover._available("nonsense") == 0
