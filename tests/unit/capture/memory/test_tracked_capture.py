"""A real guest's memory is captured by write tracking, and is exact at the last pause."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.support.scratch_qemu import Scratch
from vmckpt.capture.memory import copy_rounds, tracked_capture, tracker
from vmckpt.capture.memory.background_snapshot import Hooks
from vmckpt.capture.memory.copy_rounds import Step
from vmckpt.capture.memory.page_diff import Flags
from vmckpt.capture.memory.process_memory import ProcessMemory
from vmckpt.capture.memory.tracked_capture import Earlier, Tracked, TrackedCaptured
from vmckpt.capture.memory.tracker import TrackerState
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.errors import CannotCapture, CaptureFailed
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess


class Kept:
    """Stands for trackers: the descriptor stays in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state: TrackerState | None = None
        self.ended = 0
        monkeypatch.setattr(tracker, "take", lambda *_: None)
        monkeypatch.setattr(tracker, "start", self._start)

        class Keeper:
            def all_well(self) -> None: ...

        monkeypatch.setattr(
            tracked_capture, "undo_process_for", lambda *_, **__: nullcontext(Keeper())
        )

    def _start(self, _: str, __: HeldProcess, state: TrackerState, ___: int) -> None:
        self.state = state


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(monkeypatch)


@pytest.fixture(params=[True, False], ids=["private", "shared"])
def guest(request: pytest.FixtureRequest) -> Iterator[Scratch]:
    with Scratch(accelerator="tcg", private=request.param) as made:
        yield made


class Taking:
    """Captures of one guest, compared with the memory of the paused guest."""

    def __init__(self, guest: Scratch, process: HeldProcess, folder: Path) -> None:
        self.guest, self.process, self.folder = guest, process, folder
        self.number = 0
        self.truth: list[np.ndarray] = []
        self.stored: list[np.ndarray] = []
        """What a store would have."""

    def take(self, tracked: Tracked, *, first: bool, **hooks: Any) -> TrackedCaptured:
        memory = ProcessMemory(self.process, [one.range for one in tracked.blocks])

        def barrier() -> None:
            self.truth = [
                memory.read(index, np.array([[0, one.range.size // PAGE]]))
                for index, one in enumerate(tracked.blocks)
            ]

        self.number += 1
        earlier = Earlier(number=self.number - 1, around=lambda _, flags: flags)
        usual: dict[str, Any] = {"note": lambda _: None, "barrier": barrier}
        found = tracked_capture.capture(
            self.guest, self.folder / str(self.number), Hooks(**(usual | hooks)), tracked,
            number=self.number, earlier=None if first else earlier, stop=threading.Event(),
        )  # fmt: skip
        self._store(found)
        return found

    def _store(self, found: TrackedCaptured) -> None:
        if found.changed is None:
            self.stored = [np.zeros_like(one) for one in self.truth]
        for index, block in enumerate(found.image.blocks):
            there = found.image.present(index)
            pages = np.fromfile(found.image.file(index), dtype=np.uint64).reshape(-1, 512)
            pages[~there] = 0
            if found.changed is None or found.copied is None:
                self.stored[index] = pages
            else:
                flags: Flags = found.changed[block.name]
                assert not (flags & there & ~found.copied[block.name]).any()
                self.stored[index][flags] = pages[flags]

    def exact(self) -> bool:
        return all((a == b).all() for a, b in zip(self.truth, self.stored, strict=True))


def test_each_snapshot_is_exact_and_later_ones_read_what_was_written(
    guest: Scratch, kept: Kept, tmp_path: Path
) -> None:
    with HeldProcess(guest.pid) as process, Tracked(guest, process) as tracked:
        taking = Taking(guest, process, tmp_path)
        first = taking.take(tracked, first=True)
        assert taking.exact()
        assert first.changed is None
        assert "pauses before" in first.phases
        assert kept.state == TrackerState(1, tracked.blocks)
        for _ in range(5):
            assert guest.ask("query-status")["running"]
            again = taking.take(tracked, first=False)
            assert taking.exact()
            assert again.changed is not None
            assert again.copied is not None
            most = sum(int(np.count_nonzero(flags)) for flags in again.copied.values())
            assert most < 400
            assert {"stop", "device state", "barrier", "changed pages", "cont"} <= {*again.phases}
            assert again.image.tail()
    assert guest.ask("query-fdsets") == []


def fails(error: Exception) -> Callable[..., None]:
    def hook(*_: object) -> None:
        raise error

    return hook


@pytest.mark.parametrize("hook", ["ready", "barrier", "captured"])
def test_a_capture_that_fails_leaves_the_guest_running(
    hook: str, kept: Kept, tmp_path: Path
) -> None:
    with (
        Scratch(accelerator="tcg", private=True) as guest,
        HeldProcess(guest.pid) as process,
        Tracked(guest, process) as tracked,
    ):
        taking = Taking(guest, process, tmp_path)
        with pytest.raises(CannotCapture, match="not now"):
            taking.take(tracked, first=True, **{hook: fails(CannotCapture("not now"))})
        assert kept.state is None
        assert guest.ask("query-status")["running"]
        assert list(tmp_path.iterdir()) == []
        assert guest.ask("query-fdsets") == []
        taking.take(tracked, first=True)
        assert taking.exact()


def test_a_guest_that_writes_too_fast_is_left_to_another_method(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        copy_rounds, "decide", lambda seen: Step.GIVE_UP if seen.rounds else Step.COPY
    )
    with (
        Scratch(accelerator="tcg", private=True) as guest,
        HeldProcess(guest.pid) as process,
        Tracked(guest, process) as tracked,
    ):
        with pytest.raises(CannotCapture, match="writes its memory too fast"):
            Taking(guest, process, tmp_path).take(tracked, first=True)
        assert guest.ask("query-status")["running"]
        assert list(tmp_path.iterdir()) == []


def test_a_guest_that_was_paused_meanwhile_stays_paused(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scratch, "paused_by_user", lambda _: True)
    with (
        Scratch(accelerator="tcg", private=True) as guest,
        HeldProcess(guest.pid) as process,
        Tracked(guest, process) as tracked,
    ):
        pausing = {"ready": lambda: guest.tell("stop", {})}
        with pytest.raises(CaptureFailed, match="no longer running: its run state is paused"):
            Taking(guest, process, tmp_path).take(tracked, first=True, **pausing)
        assert not guest.ask("query-status")["running"]


def plug(guest: Scratch) -> None:
    backend = {"qom-type": "memory-backend-ram", "id": "memdimm0", "size": 128 << 20}
    guest.tell("object-add", dict[str, object](backend))
    guest.tell("device_add", {"driver": "pc-dimm", "id": "dimm0", "memdev": "memdimm0"})


@pytest.mark.parametrize("hook", ["ready", "barrier"])
def test_a_capture_during_which_memory_is_plugged_in_is_none(
    hook: str, kept: Kept, tmp_path: Path
) -> None:
    """The device state says that the memory is there, and the image does not have it."""
    with (
        Scratch(accelerator="tcg", private=True, more=("-m", "slots=2,maxmem=1G")) as guest,
        HeldProcess(guest.pid) as process,
    ):
        taking = Taking(guest, process, tmp_path)
        with (
            Tracked(guest, process) as tracked,
            pytest.raises(CannotCapture, match="plugged in or unplugged during the capture"),
        ):
            taking.take(tracked, first=True, **{hook: lambda: plug(guest)})
        assert kept.state is None
        assert guest.ask("query-status")["running"]
        assert list(tmp_path.iterdir()) == []
        with Tracked(guest, process) as tracked:
            assert [one.name for one in tracked.blocks[:2]] == ["memdimm0", "pc.ram"]
            taking.take(tracked, first=True)
            assert taking.exact()


def test_memory_that_is_plugged_in_between_two_snapshots_is_read_with_all_the_rest(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Scratch(accelerator="tcg", private=True, more=("-m", "slots=2,maxmem=1G")) as guest,
        HeldProcess(guest.pid) as process,
    ):
        taking = Taking(guest, process, tmp_path)
        with Tracked(guest, process) as tracked:
            taking.take(tracked, first=True)
            lent = Lent(kept, os.dup(tracked.writes.descriptor))
        plug(guest)
        monkeypatch.setattr(tracker, "take", lambda *_: lent)
        with Tracked(guest, process) as tracked:
            assert lent.ended
            assert tracked.number is None
            assert tracked.why == "the layout of the guest's memory has changed"
            taking.take(tracked, first=True)
            assert taking.exact()


class Lent:
    """The tracking that a tracker lends."""

    def __init__(self, kept: Kept, descriptor: int) -> None:
        self.state, self.descriptor = kept.state, descriptor
        self.ended = False

    def __enter__(self) -> "Lent":
        return self

    def __exit__(self, *_: object) -> None: ...

    def end(self) -> None:
        self.ended = True


class Blocked:
    host, name = "alpha", "web1"

    def ask(self, command: str) -> dict[str, Any]:
        return {"query-migrate": {"blocked-reasons": ["virtfs is in use"]}}[command]


def test_a_guest_whose_devices_cannot_be_saved_is_refused() -> None:
    with pytest.raises(CannotCapture, match="cannot save its devices: virtfs is in use"):
        tracked_capture._require_migratable(cast("Any", Blocked()))
