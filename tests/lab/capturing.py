"""Runs inside a lab host, beside QEMU: captures, restores and undoes there, and says so in JSON.

    python -m tests.lab.capturing WHAT GUEST FOLDER [WORDS]

`kill=N` ends it by SIGKILL right before its N-th call to QEMU, `kill=N+` right after it; `alone`
leaves out the keeper; `disk=PATH` keeps a copy of a disk of the same instant, with the link down.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import libvirt
import numpy as np

from tests.support.images import write_stream
from vmckpt.capture import migration_settings
from vmckpt.capture.memory import (
    background_snapshot,
    libvirt_save,
    ram_blocks,
    shared_memory,
    tracked_capture,
    tracker,
)
from vmckpt.capture.memory.background_snapshot import Hooks
from vmckpt.capture.memory.image import FrozenImage, write_all
from vmckpt.capture.memory.tracked_capture import Tracked
from vmckpt.capture.migration_settings import Undo
from vmckpt.capture.qemu_stream import save_image
from vmckpt.errors import CaptureFailed, VmckptError
from vmckpt.hypervisor import qmp as qmps
from vmckpt.hypervisor.qemu_process import identity, userfaultfd
from vmckpt.hypervisor.qmp import QmpMonitor

HOST = os.uname().nodename


class Killing(QmpMonitor):
    """A monitor in front of which, or behind which, the process dies."""

    calls = 0
    before: int | None = None
    after: int | None = None

    def _monitor(self, *args: Any, **more: Any) -> Any:
        self.calls += 1
        if self.calls == self.before:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = super()._monitor(*args, **more)
        if self.calls == self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


def uuid_of(name: str) -> str:
    connection = libvirt.open("qemu:///system")
    try:
        return connection.lookupByName(name).UUIDString()
    finally:
        connection.close()


def link(name: str, state: str) -> None:
    listed = subprocess.run(
        ["virsh", "domiflist", name], check=True, capture_output=True, text=True
    ).stdout
    mac = listed.split()[-1]
    subprocess.run(["virsh", "-q", "domif-setlink", name, mac, state], check=True)


class Nobody:
    """Stands for a keeper that is not there."""

    def all_well(self) -> None: ...


class Capture:
    """One order of the command line."""

    def __init__(self, name: str, folder: Path, words: list[str]) -> None:
        self.name = name
        self.folder = folder
        self.words = dict(word.partition("=")[::2] for word in words)
        self.facts = folder.with_name(folder.name + ".undo")
        self.monitor = Killing(uuid_of(name), host=HOST)
        kill = self.words.get("kill", "")
        if kill.endswith("+"):
            self.monitor.after = int(kill[:-1])
        elif kill:
            self.monitor.before = int(kill)
        if "alone" in self.words:
            for module in (background_snapshot, shared_memory, libvirt_save, tracked_capture):
                nothing = nullcontext(Nobody())
                mock.patch.object(module, "undo_process_for", return_value=nothing).start()

    def hooks(self) -> Hooks:
        return Hooks(
            note=self._note,
            barrier=self._barrier if "disk" in self.words else None,
        )

    def _note(self, undo: Undo) -> None:
        self.facts.write_text(undo.to_json())

    def _barrier(self) -> None:
        link(self.name, "down")
        self.folder.with_name(self.folder.name + ".xml").write_text(self.monitor.xml())
        shutil.copy(self.words["disk"], self.folder.with_name(self.folder.name + ".disk"))

    def background(self) -> dict[str, object]:
        stop = None
        if "stop" in self.words:
            stop = threading.Event()
            threading.Timer(float(self.words["stop"]), stop.set).start()
        goes_on = True if "goes-on" in self.words else None
        began = time.monotonic()
        done = background_snapshot.capture(
            self.monitor, self.folder, self.hooks(), goes_on=goes_on, stop=stop
        )
        window = (began, time.monotonic())
        return self._told(done.image) | {"pause": done.pause, "took": done.took, "window": window}

    def fallback(self) -> dict[str, object]:
        done = libvirt_save.capture(self.monitor, self.folder, self.hooks())
        return self._told(done.image) | {"pause": done.pause, "took": done.took}

    def shared(self) -> dict[str, object]:
        epochs, pauses, found, same = int(self.words.get("epochs", 1)), [], [], True
        with shared_memory.SharedMemory(self.monitor, self.folder) as memory:
            first = memory.epoch
            for epoch in range(epochs):
                before = self._digest()
                done = memory.capture((first or 0) + epoch + 1, self.hooks())
                pauses.append(done.pause)
                found.append(None if done.changed is None else self._count(done.changed))
                same = same and (
                    done.changed is None or self._agrees(before, done.image, done.changed)
                )
                time.sleep(float(self.words.get("every", 0.2)))
            return self._told(FrozenImage.open(self.folder)) | {
                "pauses": pauses, "changed": found, "first": first, "epoch": memory.epoch,
                "agrees": same,
            }  # fmt: skip

    def tracked(self) -> dict[str, object]:
        """Capture by write tracking, and keep it; every capture reads all memory."""
        with (
            identity.require(self.monitor.guest, self.name, HOST) as process,
            Tracked(self.monitor, process) as tracked,
        ):
            done = tracked_capture.capture(
                self.monitor, self.folder, self.hooks(), tracked, number=1, earlier=None,
                stop=threading.Event(),
            )  # fmt: skip
        return self._told(done.image)

    def protected(self) -> dict[str, object]:
        """How many pages of QEMU's memory are write-protected, after its tracker has ended."""
        tracker.end(self.monitor.guest)
        count = 0
        with identity.require(self.monitor.guest, self.name, HOST) as process:
            found = ram_blocks.find(self.monitor, process)
            with Path(f"/proc/{process.pid}/pagemap").open("rb", buffering=0) as file:
                for one in (*found.guest, *found.private):
                    file.seek(one.range.start // 512)
                    entries = np.frombuffer(file.read(one.range.size // 512), dtype=np.uint64)
                    count += int(np.count_nonzero(entries & np.uint64(1 << 57)))
            return {"pages": count, "descriptors": len(list(userfaultfd.opened(process)))}

    def _digest(self) -> dict[str, np.ndarray[Any, Any]]:
        try:
            image = FrozenImage.open(self.folder)
        except CaptureFailed:
            return {}
        return {
            block.name: np.fromfile(image.file(i), dtype=np.uint64).reshape(-1, 512)
            for i, block in enumerate(image.blocks)
        }

    def _agrees(self, before: dict[str, Any], image: FrozenImage, changed: dict[str, Any]) -> bool:
        """Whether every page that is another now was told to have changed."""
        for index, block in enumerate(image.blocks):
            now = np.fromfile(image.file(index), dtype=np.uint64).reshape(-1, 512)
            other = (now != before[block.name]).any(axis=1)
            if (other & ~changed[block.name]).any():
                return False
        return True

    def _count(self, changed: dict[str, Any]) -> int:
        return sum(int(flags.sum()) for flags in changed.values())

    def _told(self, image: FrozenImage) -> dict[str, object]:
        return {
            "state": self.monitor.run_state(),
            "pages": sum(int(image.present(i).sum()) for i in range(len(image.blocks))),
            "calls": self.monitor.calls,
        }

    def restore(self) -> dict[str, object]:
        """End the guest and start it from its image, its disk put back."""
        image = FrozenImage.open(self.folder)
        xml_file = self.folder.with_name(self.folder.name + ".xml")
        xml = xml_file.read_text() if xml_file.exists() else self.monitor.xml()
        subprocess.run(["virsh", "-q", "destroy", self.name], check=True)
        if "disk" in self.words:
            shutil.copy(self.folder.with_name(self.folder.name + ".disk"), self.words["disk"])
        began = time.monotonic()

        def fill(file: int) -> None:
            def write(data: bytes | bytearray | memoryview) -> None:
                write_all(file, memoryview(data), None)

            write(save_image.header(xml, running=True))
            write_stream(image, write)

        with tempfile.TemporaryDirectory() as folder, save_image.Fifo(Path(folder), fill) as path:
            qmps.restore(str(path), xml, paused="paused" in self.words, host=HOST)
        took = time.monotonic() - began
        if "disk" in self.words:
            link(self.name, "up")
        return {"took": took}

    def undo(self) -> dict[str, object]:
        undo = Undo.from_json(self.facts.read_text())
        migration_settings.break_off(self.monitor, undo)
        if undo.folder:
            shutil.rmtree(undo.folder, ignore_errors=True)
        return {}

    def look(self) -> dict[str, object]:
        """How QEMU is set."""
        told = self.monitor.ask("query-migrate-capabilities")
        return {
            "on": [one["capability"] for one in told if one["state"]],
            "bandwidth": self.monitor.ask("query-migrate-parameters")["max-bandwidth"],
            "state": self.monitor.run_state(),
            "folder": self.folder.exists(),
        }


def main() -> None:
    what, name, folder, *words = sys.argv[1:]
    try:
        answer = getattr(Capture(name, Path(folder), words), what)()
    except VmckptError as exc:
        answer = {"error": type(exc).__name__, "message": str(exc)}
    print(json.dumps(answer))  # noqa: T201


if __name__ == "__main__":
    main()
