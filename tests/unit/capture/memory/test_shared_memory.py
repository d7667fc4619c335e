"""An epoch's pause, and what another program's `resume` in the middle of it does to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from vmckpt.capture.memory.memory_files import MemoryFile
from vmckpt.capture.memory.pipe_reader import Drain
from vmckpt.capture.memory.shared_memory import PausedCapture, Resumed, SharedMemory
from vmckpt.capture.migration_settings import Undo
from vmckpt.errors import CannotCapture, CaptureFailed

UNDO = Undo(guest="u-1", capabilities={"x-ignore-shared": False}, bandwidth=0, runs=True, folder="")


@dataclass
class Qemu:
    """Says what state it is in; `resumed` after an order of that name."""

    resumed: str = ""
    state: str = "running"
    told: list[str] = field(default_factory=list)
    after: Mapping[str, str] = field(
        default_factory=lambda: {"stop": "paused", "migrate": "postmigrate", "cont": "running"}
    )
    migration: Mapping[str, str] = field(default_factory=lambda: {"status": "completed"})
    name: str = "web1"
    host: str = "alpha"

    def tell(self, what: str, _: object, **__: object) -> None:
        self.told.append(what)
        self.state = self.after.get(what, self.state)
        if what == self.resumed:
            self.state = "running"

    def ask(self, what: str, **_: object) -> Any:
        return self.migration if what == "query-migrate" else {}

    def run_state(self) -> str:
        return self.state


class Ended:
    """A pipe of which all was read."""

    def ended(self, _: float) -> bool:
        return True


class Comparison:
    def __init__(self, qemu: Qemu, while_it_compares: Callable[[], None]) -> None:
        self._qemu, self._work = qemu, while_it_compares
        self.asked = 0

    def result(self) -> list[int]:
        self.asked += 1
        self._work()
        return [7]


def take(qemu: Qemu, while_it_compares: Callable[[], None] = lambda: None) -> list[int]:
    still = PausedCapture(cast("Any", qemu), UNDO, cast("Drain", Ended()))
    return still.take(lambda: Comparison(qemu, while_it_compares), lambda mark: mark("output"))


def test_one_that_stands_still_goes_on_afterwards() -> None:
    qemu = Qemu()
    assert take(qemu) == [7]
    assert (qemu.told[0], qemu.told[-1], qemu.state) == ("stop", "cont", "running")


@pytest.mark.parametrize("state", ["running", "paused"])
def test_one_that_was_resumed_while_it_was_compared_is_discarded(state: str) -> None:
    """It may also have been paused again: then it has run for a moment."""
    qemu = Qemu()
    with pytest.raises(Resumed, match="web1 on alpha did not stay paused") as caught:
        take(qemu, lambda: setattr(qemu, "state", state))
    assert caught.value.found == [7]
    assert "cont" not in qemu.told


def test_one_that_was_resumed_while_its_state_was_written_is_discarded() -> None:
    qemu = Qemu(resumed="migrate")
    with pytest.raises(Resumed) as caught:
        take(qemu)
    assert caught.value.found == [7]


def test_a_stream_that_fails_is_another_matter() -> None:
    qemu = Qemu(after={"stop": "paused", "migrate": "shutdown"})
    with pytest.raises(CaptureFailed, match="the guest's run state is shutdown, not postmigrate"):
        take(qemu)


@pytest.mark.parametrize("status", ["failed", "cancelled", "active", "none"])
def test_a_device_state_that_is_not_complete_is_none(status: str) -> None:
    """Of a guest that stood still before, QEMU's run state is the same as after a good one."""
    qemu = Qemu(migration={"status": status, "error-desc": "what went wrong"})
    with pytest.raises(CaptureFailed, match=r"what went wrong|as completely saved"):
        take(qemu)
    assert "cont" not in qemu.told


def test_one_that_is_still_ending_its_migration_is_waited_for() -> None:
    """A `cont` in that gap may crash QEMU."""

    class Slow(Qemu):
        left = 3

        def run_state(self) -> str:
            if self.state == "finish-migrate":
                self.left -= 1
                self.state = self.state if self.left else "postmigrate"
            return self.state

    qemu = Slow(after={"stop": "paused", "migrate": "finish-migrate", "cont": "running"})
    assert take(qemu) == [7]
    assert qemu.told[-1] == "cont"


def test_what_was_switched_for_it_is_put_back_before_it_runs() -> None:
    """With that capability left on the next `virsh save` would lose its memory."""
    qemu = Qemu()
    take(qemu)
    on, off = [at for at, what in enumerate(qemu.told) if what == "migrate-set-capabilities"]
    assert on < qemu.told.index("migrate") < off < qemu.told.index("cont")


class Backends:
    """A guest's memory, of which a capture has mapped some."""

    host, name = "alpha", "web1"

    def ask(self, command: str) -> list[dict[str, str]]:
        assert command == "query-memdev"
        return [{"id": "pc.ram"}, {"id": "memdimm0"}]


def test_memory_that_came_during_a_capture_is_none_of_it() -> None:
    memory = SharedMemory.__new__(SharedMemory)
    memory._monitor = cast("Any", Backends())
    files = [MemoryFile((name,), 4096, Path("/")) for name in ("memdimm0", "pc.ram")]
    memory._files = tuple(files)
    memory._require_same_memory()
    memory._files = tuple(files[1:])
    with pytest.raises(CannotCapture, match="plugged in or unplugged during the capture"):
        memory._require_same_memory()


def test_its_output_is_closed_before_the_comparison_is_waited_for() -> None:
    """The comparison may last, and an epoch's disks and output are of the moment of its devices."""
    qemu, steps = Qemu(), list[str]()
    still = PausedCapture(cast("Any", qemu), UNDO, cast("Drain", Ended()))
    still.take(
        lambda: Comparison(qemu, lambda: steps.append("compared")),
        lambda _: steps.append("output closed"),
    )
    assert steps == ["output closed", "compared"]
