"""A guest's memory is captured in another way where the first one does not work."""

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from vmckpt.agent.snapshot import memory_methods
from vmckpt.agent.snapshot.choose_method import MemoryMethod
from vmckpt.agent.snapshot.memory_methods import CaptureRequest, Memory
from vmckpt.agent.snapshot.memory_parent import MemoryParent
from vmckpt.capture.disks import bitmaps
from vmckpt.capture.memory import background_snapshot, libvirt_save, memory_files, tracker
from vmckpt.capture.memory.background_snapshot import Captured, Hooks
from vmckpt.capture.memory.image import FrozenImage
from vmckpt.errors import CannotCapture
from vmckpt.units import Seconds


class Monitor:
    """Stands for a running guest's monitor, without a QEMU."""

    guest, host, name = "u-1", "alpha", "web1"

    def run_state(self) -> str:
        return "running"

    def ask(self, command: str) -> dict[str, int]:
        assert command == "query-memory-size-summary"
        return {"base-memory": 1 << 20}


def captured(
    monkeypatch: pytest.MonkeyPatch, way: MemoryMethod, *failing: str, closed: bool = False
) -> Memory:
    """A capture, where some of the ways cannot capture the guest. `closed`: QEMU could not open
    an image again."""

    def check(_: object) -> None:
        if closed:
            raise CannotCapture("its QEMU has no permission to reopen a.raw")

    def fails(*_: object, **__: object) -> Captured:
        raise CannotCapture("no userfaultfd")

    def works(*_: object, **__: object) -> Captured:
        return Captured(image=cast("FrozenImage", object()), pause=Seconds(0.1), took=Seconds(0.2))

    monkeypatch.setattr(background_snapshot, "capture", fails if "background" in failing else works)
    monkeypatch.setattr(libvirt_save, "capture", fails if "libvirt" in failing else works)
    monkeypatch.setattr(memory_files, "drop", lambda _: None)
    monkeypatch.setattr(bitmaps, "require_reopen", check)
    monkeypatch.setattr(tracker, "end", lambda _: False)
    parent = MemoryParent(None, "there is none")
    wanted = CaptureRequest(way=way, folder=Path("/none"), number=5, parent=parent)
    monitor: Any = Monitor()
    with ExitStack() as stack:
        return memory_methods.capture(
            monitor, wanted, Hooks(note=lambda _: None), threading.Event(), stack
        )


def test_libvirt_comes_in_where_the_background_does_not_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = captured(monkeypatch, MemoryMethod.AUTO)
    assert (plain.way, plain.warnings, plain.copy) == (MemoryMethod.BACKGROUND, (), None)
    other = captured(monkeypatch, MemoryMethod.AUTO, "background")
    assert other.way is MemoryMethod.LIBVIRT
    assert other.warnings == ("method background failed: no userfaultfd",)
    for way, failing in (
        (MemoryMethod.BACKGROUND, ["background"]), (MemoryMethod.LIBVIRT, ["libvirt"]),
        (MemoryMethod.AUTO, ["background", "libvirt"]),
    ):  # fmt: skip
        with pytest.raises(CannotCapture, match="no userfaultfd"):
            captured(monkeypatch, way, *failing)
    with pytest.raises(CannotCapture, match="nothing was captured; omit --way, so that"):
        captured(monkeypatch, MemoryMethod.SHARED)


def test_what_lets_go_of_no_image_needs_to_open_none_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert captured(monkeypatch, MemoryMethod.AUTO, closed=True).way is MemoryMethod.BACKGROUND
    with pytest.raises(CannotCapture, match="no permission to reopen"):
        captured(monkeypatch, MemoryMethod.AUTO, "background", closed=True)
    with pytest.raises(CannotCapture, match="no permission to reopen"):
        captured(monkeypatch, MemoryMethod.LIBVIRT, closed=True)
