"""The background snapshot: a guest's stream becomes an image, and the guest is as it was."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.migrating import Qemu
from tests.support.streams import SHORT_STREAM, parsed
from vmckpt.capture.memory import background_snapshot
from vmckpt.capture.memory.background_snapshot import Hooks
from vmckpt.capture.migration_settings import BACKGROUND, Undo
from vmckpt.errors import CannotCapture, CaptureFailed
from vmckpt.hypervisor.qmp import QmpRefused
from vmckpt.units import Seconds


class Sending(Qemu):
    """Sends a stream when it is told to migrate, unless it refuses; then it says how it went."""

    def __init__(self, *, state: str = "running", stream: bytes = SHORT_STREAM) -> None:
        super().__init__(state=state)
        self.stream = stream
        self.refuses: str | None = None
        self.becomes: dict[str, Any] = {"status": "completed", "downtime": 12}
        self.pipe = -1
        self.senders: list[threading.Thread] = []
        self.migration: dict[str, Any] = {}

    def ask(self, command: str, **more: object) -> Any:
        return self.migration if command == "query-migrate" else super().ask(command, **more)

    def tell(self, command: str, arguments: dict[str, Any], *, files: tuple[int, ...] = ()) -> Any:
        super().tell(command, arguments)
        if command == "getfd":
            self.pipe = os.dup(files[0])
        if command == "migrate":
            if self.refuses is not None:
                os.close(self.pipe)
                raise QmpRefused(f"alpha: migrate: {self.refuses}", host="alpha")
            self.senders.append(threading.Thread(target=self._send))
            self.senders[-1].start()

    def _send(self) -> None:
        self.migration = self.becomes
        with os.fdopen(self.pipe, "wb") as pipe:
            pipe.write(self.stream)

    def settled(self) -> bool:
        """Whether it is as before the capture, but for whether it runs."""
        for one in self.senders:
            one.join()
        return not self.capabilities["background-snapshot"] and self.bandwidth == 134217728


def test_the_image_is_what_the_guest_sent_and_the_guest_runs_on(tmp_path: Path) -> None:
    qemu, noted = Sending(), list[Undo]()
    done: list[tuple[int, int]] = []
    hooks = Hooks(note=noted.append, progress=lambda now, total: done.append((now, total)))
    found = background_snapshot.capture(qemu, tmp_path / "image", hooks)
    sent = parsed(SHORT_STREAM)
    assert (found.image.head, found.image.tail()) == (sent.head, sent.tail_bytes)
    assert found.pause == Seconds(0.012)
    assert noted[0].capabilities == {BACKGROUND: False}
    assert 0 < done[-1][0] <= done[-1][1]
    assert qemu.settled()
    assert qemu.state == "running"


def test_disks_are_opened_while_it_stands_still_and_before_its_memory_is_sent(
    tmp_path: Path,
) -> None:
    qemu, seen = Sending(), list[tuple[str, str, bool]]()
    hooks = Hooks(
        note=lambda _: None,
        barrier=lambda: seen.append(("barrier", qemu.state, "migrate" in qemu.told)),
        captured=lambda: seen.append(("captured", qemu.state, "migrate" in qemu.told)),
    )
    background_snapshot.capture(qemu, tmp_path / "image", hooks)
    assert seen == [("barrier", "paused", False), ("captured", "running", True)]
    assert qemu.settled()


def test_one_that_stood_still_still_does(tmp_path: Path) -> None:
    qemu = Sending(state="paused")
    found = background_snapshot.capture(qemu, tmp_path / "image", Hooks(note=lambda _: None))
    assert found.pause == 0.0
    assert qemu.settled()
    assert qemu.state == "paused"


@pytest.mark.parametrize(
    ("refuses", "error", "why"),
    [
        (
            "Background-snapshot is not supported by host kernel",
            CannotCapture,
            "does not let QEMU use userfaultfd",
        ),
        (
            "State blocked by non-migratable device",
            CannotCapture,
            "a background snapshot is not possible",
        ),
        ("out of memory", QmpRefused, "out of memory"),
    ],
)
def test_a_qemu_that_cannot_do_it_says_why_and_nothing_is_left(
    tmp_path: Path, refuses: str, error: type[Exception], why: str
) -> None:
    qemu = Sending()
    qemu.refuses = refuses
    with pytest.raises(error, match=why):
        background_snapshot.capture(qemu, tmp_path / "image", Hooks(note=lambda _: None))
    assert qemu.settled()
    assert (qemu.state, list(tmp_path.iterdir())) == ("running", [])


def test_a_capture_that_breaks_off_leaves_no_image(tmp_path: Path) -> None:
    qemu, given_up = Sending(stream=b""), list[bool]()
    qemu.becomes = {"status": "failed", "error-desc": "the pipe is gone"}
    hooks = Hooks(note=lambda _: None, given_up=lambda: given_up.append(True))
    with pytest.raises(CaptureFailed, match="failed: the pipe is gone"):
        background_snapshot.capture(qemu, tmp_path / "image", hooks)
    assert given_up == [True]
    assert qemu.settled()
    assert (qemu.state, list(tmp_path.iterdir())) == ("running", [])


@pytest.mark.parametrize(("status", "again"), [("failed", True), ("completed", False)])
def test_marks_of_a_broken_one_are_taken_off_by_another_into_nothing(
    status: str, again: bool
) -> None:
    qemu = Sending()
    qemu.migration = {"status": status}
    qemu.capabilities[BACKGROUND] = True
    undo = Undo(
        guest=qemu.guest, capabilities={BACKGROUND: False}, bandwidth=134217728, runs=True,
        folder="",
    )  # fmt: skip
    background_snapshot.undo_capture(qemu, undo)
    assert ("migrate" in qemu.told) is again
    assert qemu.settled()
