"""One epoch's capture, with a QEMU that writes a device state when it is told to migrate."""

import os
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest

from tests.support.replicas import Qemu
from vmckpt.capture.memory.shared_memory import Resumed
from vmckpt.capture.migration_settings import IGNORE_SHARED, Undo
from vmckpt.capture.qemu_stream.header import EOF, MAGIC, Head, RamBlock
from vmckpt.errors import CaptureFailed, HypervisorError
from vmckpt.replication.dirty_pages.finder import Changed
from vmckpt.replication.primary.epoch_capture import Capturer, DeviceStateCapturer

UNDO = Undo(guest="g", capabilities={IGNORE_SHARED: False}, bandwidth=7, runs=True, folder="")
HEAD = Head(
    machine="pc-i440fx-7.2", section=2, instance=0, version=4, footers=True,
    blocks=(RamBlock("pc.bios", 1 << 16),),
)  # fmt: skip
BEGINNING = MAGIC + (3).to_bytes(4, "big")
STATE = b"what the devices are" * 100
NONE = Changed(numbers=np.zeros(0, dtype=np.intp), pages=np.zeros((0, 512), dtype=np.uint64))


class Migrating(Qemu):
    """Takes the pipe, and writes to it when it migrates."""

    def __init__(self) -> None:
        super().__init__()
        self._pipe = -1
        self.on = False
        self.bandwidth = 0
        self.status = "none"
        self.ends = "postmigrate"

    def ask(self, command: str, **arguments: object) -> Any:
        if command == "query-migrate":
            return {"status": self.status, "error-desc": "no room"}
        return super().ask(command, **arguments)

    def tell(self, command: str, arguments: dict[str, Any], *, files: tuple[int, ...] = ()) -> Any:
        super().tell(command, arguments, files=files)
        match command:
            case "getfd":
                self._pipe = os.dup(files[0])
            case "closefd":
                if self._pipe < 0:
                    raise HypervisorError("File descriptor named 'vmckpt' not found", host="alpha")
                self._drop()
            case "migrate-set-capabilities":
                (told,) = arguments["capabilities"]
                self.on = told["state"]
                self.events[-1] = f"{told['capability']} {'on' if self.on else 'off'}"
            case "migrate-set-parameters":
                self.bandwidth = arguments["max-bandwidth"]
            case "migrate":
                os.write(self._pipe, STATE)
                self._drop()
                self.status = "completed" if self.ends == "postmigrate" else "failed"
                self.state = self.ends
            case _:
                pass

    def _drop(self) -> None:
        os.close(self._pipe)
        self._pipe = -1


class Saving(Migrating):
    """Writes the state of its devices to a file that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self._file = -1
        self.resumed = self.released = False

    def tell(self, command: str, arguments: dict[str, Any], *, files: tuple[int, ...] = ()) -> Any:
        super().tell(command, arguments, files=files)
        match command:
            case "add-fd":
                self._file = os.dup(files[0])
                return {"fdset-id": 3, "fd": self._file}
            case "xen-save-devices-state":
                assert arguments["filename"] == "/dev/fdset/3"
                self.released = arguments["live"]
                os.write(self._file, BEGINNING + b"the devices" + bytes([EOF]))
                self.state = "running" if self.resumed else self.state
            case "remove-fd":
                os.close(self._file)
            case _:
                pass
        return None


class Log:
    def __init__(self, events: list[str]) -> None:
        self._events = events
        self.open = False

    def size(self) -> int:
        self._events.append("log's end")
        return 4096

    def set_open(self, on: bool) -> None:
        self.open = on
        self._events.append("open" if on else "closed")


class World:
    """A capturer with all that it uses; `breaks` names what raises."""

    def __init__(self, breaks: str = "", qemu: Migrating | None = None) -> None:
        self.qemu = Migrating() if qemu is None else qemu
        self.events, self._breaks = self.qemu.events, breaks
        self.log = Log(self.events)
        self.stands = False
        self.capturer = Capturer(
            self.qemu, UNDO, finder=self, output=self, logs=[self.log], still=self.still,
        )  # fmt: skip

    def saving(self) -> DeviceStateCapturer:
        """Another capturer with the same parts."""
        return DeviceStateCapturer(
            self.qemu, UNDO, HEAD, finder=self, output=self, logs=[self.log], still=self.still,
        )  # fmt: skip

    def _event(self, name: str) -> None:
        self.events.append(name)
        if name == self._breaks:
            raise CaptureFailed(f"{name} broke")

    def prepare(self) -> None:
        self._event("prepare")

    def begin(self) -> "Future[list[Changed]]":
        self._event("compare")
        made: Future[list[Changed]] = Future()
        if self._breaks == "result":
            made.set_exception(MemoryError("no room for what changed"))
        else:
            made.set_result([NONE])
        return made

    def close_epoch(self) -> int:
        self._event("output")
        return 3

    def still(self, on: bool) -> None:
        self.stands = on
        self.events.append("stands still" if on else "runs")


def test_an_epoch_has_all_of_one_instant() -> None:
    one = World()
    epoch = one.capturer.take()
    assert (epoch.state, epoch.ends, epoch.packets) == (STATE, (4096,), 3)
    assert epoch.changed == [NONE]
    assert list(epoch.phases) == ["stop", "device state", "output", "compare", "cont"]
    assert abs(sum(epoch.phases.values()) - epoch.pause) < 1e-6


def test_its_steps_come_in_the_one_order_that_is_right() -> None:
    one = World()
    one.capturer.take()
    assert one.events == [
        "prepare", "open", "stands still", "getfd", "stop", "compare", "x-ignore-shared on",
        "migrate", "log's end", "output", "x-ignore-shared off", "cont", "closed", "runs",
    ]  # fmt: skip


def test_one_follows_the_other() -> None:
    one = World()
    for _ in range(3):
        assert one.capturer.take().state == STATE
    assert one.events.count("cont") == 3


def test_the_last_one_leaves_the_guest_standing() -> None:
    one = World()
    one.capturer.take(goes_on=False)
    assert "cont" not in one.events
    assert (one.qemu.on, one.log.open, one.stands) == (False, False, True)


@pytest.mark.parametrize("breaks", ["compare", "output", "result"])
def test_what_breaks_in_the_middle_is_put_back_and_the_guest_runs(breaks: str) -> None:
    one = World(breaks)
    with pytest.raises((CaptureFailed, MemoryError)):
        one.capturer.take()
    assert one.qemu.state == "running"
    assert (one.qemu.on, one.log.open, one.stands) == (False, False, False)
    assert one.qemu.bandwidth == UNDO.bandwidth
    assert one.events[-1] == "closed"


@pytest.mark.parametrize(
    "command", ["getfd", "stop", "migrate-set-capabilities", "migrate", "cont"]
)
def test_a_command_that_qemu_refuses_is_no_end_of_the_guest(command: str) -> None:
    one = World()
    one.qemu.fails = {command: HypervisorError(f"{command}: no", host="alpha")}
    with pytest.raises(HypervisorError, match=f"{command}: no"):
        one.capturer.take()
    assert one.qemu.state == "running"
    assert (one.qemu.on, one.log.open, one.stands) == (False, False, False)


def test_a_device_state_that_qemu_does_not_write_to_its_end_is_a_failed_capture() -> None:
    one = World()
    one.qemu.ends = "paused"
    with pytest.raises(CaptureFailed, match="no room"):
        one.capturer.take()
    assert "output" not in one.events
    assert one.qemu.state == "running"
    assert not one.log.open


def test_the_logs_are_closed_even_if_nothing_can_be_put_back() -> None:
    one = World("output")
    one.qemu.fails = {"migrate-set-parameters": HypervisorError("gone", host="alpha")}
    with pytest.raises(CaptureFailed, match="output broke"):
        one.capturer.take()
    assert not one.log.open
    assert one.stands  # the guard sees to it


def test_nothing_is_begun_if_memory_cannot_be_looked_at() -> None:
    one = World("prepare")
    with suppress(CaptureFailed):
        one.capturer.take()
    assert one.events == ["prepare"]


@pytest.mark.parametrize("breaks", [False, True])
def test_a_pause_ends_whatever_becomes_of_it(breaks: bool) -> None:
    one = World()
    states = []

    def work() -> None:
        states.append((one.qemu.state, one.log.open, one.stands))
        if breaks:
            raise CaptureFailed("it broke")

    with pytest.raises(CaptureFailed) if breaks else nullcontext():
        one.capturer.pause(work)
    assert states == [("paused", True, True)]
    assert (one.qemu.state, one.log.open, one.stands) == ("running", False, False)


def test_a_guest_that_is_paused_already_stays_so() -> None:
    one = World()
    one.qemu.state = "paused"
    one.capturer.pause(lambda: one.events.append("work"))
    assert one.events == ["work"]
    assert one.qemu.state == "paused"


# --- without a migration --------------------------------------------------------------------------


def test_a_device_state_is_saved_without_a_migration() -> None:
    one = World(qemu=Saving())
    epoch = one.saving().take()
    assert one.events == [
        "prepare", "add-fd", "open", "stands still", "stop", "compare", "xen-save-devices-state",
        "log's end", "output", "cont", "closed", "runs", "remove-fd",
    ]  # fmt: skip
    assert epoch.state.startswith(HEAD.written() + b"the devices" + bytes([EOF]))
    assert (epoch.ends, epoch.packets, epoch.changed) == ((4096,), 3, [NONE])
    assert list(epoch.phases) == ["stop", "device state", "output", "changed pages", "cont"]
    assert abs(sum(epoch.phases.values()) - epoch.pause) < 1e-6


def test_the_last_device_state_leaves_the_guest_standing() -> None:
    qemu = Saving()
    one = World(qemu=qemu)
    one.saving().take()
    assert not qemu.released
    one.saving().take(goes_on=False)
    assert (one.qemu.state, one.log.open, one.stands) == ("paused", False, True)
    assert qemu.released, "the other host uses the images"


@pytest.mark.parametrize("breaks", ["compare", "output", "result"])
def test_what_breaks_beside_a_saved_state_is_put_back(breaks: str) -> None:
    one = World(breaks, Saving())
    with pytest.raises((CaptureFailed, MemoryError)):
        one.saving().take()
    assert one.qemu.state == "running"
    assert (one.log.open, one.stands) == (False, False)


@pytest.mark.parametrize("command", ["stop", "add-fd", "xen-save-devices-state", "cont"])
def test_a_refused_command_beside_a_saved_state_is_no_end_of_the_guest(command: str) -> None:
    one = World(qemu=Saving())
    one.qemu.fails = {command: HypervisorError(f"{command}: no", host="alpha")}
    with pytest.raises(HypervisorError, match=f"{command}: no"):
        one.saving().take()
    assert one.qemu.state == "running"
    assert (one.log.open, one.stands) == (False, False)


def test_a_guest_that_was_resumed_meanwhile_is_captured_again() -> None:
    qemu = Saving()
    qemu.resumed = True
    one = World(qemu=qemu)
    with pytest.raises(Resumed, match="was resumed during its capture: it is running") as caught:
        one.saving().take()
    assert caught.value.found == [NONE]
    assert one.qemu.state == "running"
