"""Capture the disks of a guest that is off, with the same interface as `live`.

qemu-nbd serves each image read-only and holds QEMU's lock on it. So no other program can have the
image open for writing, and the guest cannot be started meanwhile.
"""

import json
import socket
import subprocess
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from vmckpt.capture.disks.live import DiskUndo, remove_left
from vmckpt.capture.disks.plan import DiskPlan, How, Parent, plan
from vmckpt.capture.disks.reader import DiskReader, opened
from vmckpt.errors import BadInput, GuestLocked, HypervisorError
from vmckpt.hypervisor.backup import Backups
from vmckpt.model.disk import MARK, Bitmap, DiskFacts, OpenBackup, OpenDisk, is_locked
from vmckpt.units import Bytes

_PATIENCE = 30.0
"""Seconds to wait for qemu-nbd and qemu-img to open an image."""
_TURN = 0.01
_VERSIONS = {"0.10": 2, "1.1": 3}


class OffDisks:
    """The disks of one snapshot of a guest that is off. Use as `with OffDisks(...) as disks`.

    Leaving the block closes the images.
    """

    def __init__(
        self, backups: Backups, *, guest: str, host: str, snapshot: str, folder: Path
    ) -> None:
        """`guest`: a UUID; `folder`: an existing directory for sockets."""
        self.plan: DiskPlan | None = None
        self._backups, self._guest, self._host = backups, guest, host
        self._snapshot, self._folder = snapshot, folder
        self._since: str | None = None
        self._facts: tuple[DiskFacts, ...] = ()
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self._open: tuple[OpenDisk, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def prepare(self, parent: Parent | None, others: Collection[str] = ()) -> DiskUndo:
        """Plan the capture. Returns the undo record, to be stored before the capture starts.

        Checkpoints are not changed. Raises BadInput for a disk that can only be read through a
        running guest, GuestLocked, HypervisorError.
        """
        del others
        self._facts = tuple(self._looked(one) for one in self._backups.facts())
        self.plan = plan(self._facts, parent, ())
        self._since = parent.checkpoint if parent is not None else None
        sockets = tuple(str(self._socket(one)) for one in self._names())
        return DiskUndo(guest=self._guest, snapshot=self._snapshot, socket="", files=sockets)

    def _names(self) -> list[str]:
        choices = self.plan.choices if self.plan is not None else ()
        return [one.name for one in choices if one.how is not How.LEFT_OUT]

    def _socket(self, disk: str) -> Path:
        return self._folder / f"{MARK}{self._snapshot}.{disk}.nbd"

    def make_room(self) -> None:
        """Do nothing: the guest is off, so there is no overwritten data to keep."""

    def restart(self) -> None:
        """Close all images, so that `freeze_point` can open them again."""
        self.end()

    def freeze_point(self) -> None:
        """Open all images and lock them against changes.

        Raises GuestLocked, HypervisorError, OSError.
        """
        assert self.plan is not None
        bitmaps = {one.name: self._since for one in self.plan.choices if one.how is How.INCREMENTAL}
        disks = {one.name: one for one in self._facts}
        for name in self._names():
            self._programs[name] = self._serve(disks[name], bitmaps.get(name))
        for name in self._names():
            self._wait(name)
        self._open = tuple(
            OpenDisk(name=name, changed=f"qemu:dirty-bitmap:{bitmap}" if bitmap else None)
            for name in self._names()
            for bitmap in [bitmaps.get(name)]
        )

    def _serve(self, disk: DiskFacts, bitmap: str | None) -> "subprocess.Popen[bytes]":
        words = ["qemu-nbd", "--read-only", "--persistent", "--shared=4", f"--format={disk.format}"]
        words += [f"--socket={self._socket(disk.name)}", f"--export-name={disk.name}"]
        words += [f"--bitmap={bitmap}"] if bitmap else []
        # qemu-nbd is killed with this process: while an image is locked, the guest cannot start.
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *words, "--", str(disk.source)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip

    def _wait(self, name: str) -> None:
        program, give_up = self._programs[name], time.monotonic() + _PATIENCE
        while not _listens(self._socket(name)):
            if program.poll() is not None:
                _, said = program.communicate()
                raise self._refused(name, said.decode(errors="replace"))
            if time.monotonic() > give_up:
                raise self._refused(name, f"qemu-nbd did not open the disk within {_PATIENCE:g} s")
            time.sleep(_TURN)

    @property
    def disks(self) -> tuple[OpenDisk, ...]:
        """The disks that can be read now."""
        return self._open

    @property
    def facts(self) -> tuple[DiskFacts, ...]:
        """Facts about the captured disks."""
        names = set(self._names())
        return tuple(one for one in self._facts if one.name in names)

    def reader(self, disk: OpenDisk) -> DiskReader:
        """Open a disk for reading. Raises HypervisorError."""
        served = OpenBackup(socket=str(self._socket(disk.name)), disks=(disk,))
        return opened(served, disk, self._host)

    def end(self) -> None:
        """Close all images; may be repeated."""
        programs, self._programs, self._open = self._programs, {}, ()
        for program in programs.values():
            program.kill()
            program.communicate()
        remove_left([str(self._socket(name)) for name in programs])

    def keep_bitmap(self, others: Collection[str] = ()) -> None:
        """Do nothing: this capture creates no checkpoint, and the previous one stays in use."""

    def _looked(self, disk: DiskFacts) -> DiskFacts:
        """Return a disk's facts, completed with facts from its image.

        Raises BadInput, GuestLocked, HypervisorError.
        """
        if disk.source is None or disk.device not in ("disk", "lun"):
            return disk
        if disk.kind not in ("file", "block"):
            raise BadInput(
                f"{self._host}: disk {disk.name} has type {disk.kind}, which can only be read while"
                " the guest is running; nothing was captured",
                hint="start the guest",
            )
        words = ["qemu-img", "info", "--output=json", "-f", disk.format, "--", disk.source]
        try:
            done = subprocess.run(words, capture_output=True, check=False, timeout=_PATIENCE)
            if done.returncode != 0:
                raise self._refused(disk.name, done.stderr.decode(errors="replace"))
            return read_info(disk, json.loads(done.stdout))
        except (OSError, ValueError, TypeError, LookupError, subprocess.TimeoutExpired) as exc:
            raise self._refused(disk.name, str(exc)) from exc

    def _refused(self, name: str, said: str) -> HypervisorError | GuestLocked:
        why = " ".join(said.split())[:200]
        if is_locked(why):
            return GuestLocked(
                f"{self._host}: disk {name} is open in another process; nothing was captured",
                hint=f"find the process: fuser -v {self._source(name)}",
            )
        text = f"{self._host}: disk {name} cannot be read: {why}"
        return HypervisorError(text, host=self._host)

    def _source(self, name: str) -> str:
        return next((one.source or "" for one in self._backups.facts() if one.name == name), "")


def read_info(disk: DiskFacts, told: Mapping[str, Any]) -> DiskFacts:
    """Return a disk's facts, completed with the output of `qemu-img info`.

    Raises LookupError, TypeError or ValueError if the output is invalid.
    """
    data = told.get("format-specific", {}).get("data", {})
    return replace(
        disk,
        size=Bytes(int(told["virtual-size"])),
        version=_VERSIONS.get(str(data.get("compat"))),
        base=_base(told),
        bitmaps=tuple(
            Bitmap(
                name=str(one["name"]),
                recording="auto" in one["flags"],
                inconsistent="in-use" in one["flags"],
            )
            for one in data.get("bitmaps", ())
        ),
    )


def _base(told: Mapping[str, Any]) -> tuple[str, str] | None:
    path = str(told.get("full-backing-filename") or told.get("backing-filename") or "")
    kind = str(told.get("backing-filename-format") or "")
    return (path, kind) if path.startswith("/") and kind else None


def _listens(place: Path) -> bool:
    """Return whether a process accepts connections on a socket.

    The path exists before the process accepts connections.
    """
    with socket.socket(socket.AF_UNIX) as trial:
        try:
            trial.connect(str(place))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True
