"""List and copy files from a disk without mounting it: with debugfs, for ext2, ext3 and ext4.

The disk is served over NBD. qemu-storage-daemon exports a partition of it as a file, and fetches
only the data that debugfs reads. The file system's journal is not replayed, so data that is only in
the journal is missing from the files.
"""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vmckpt.capture.nbd.protocol import Unix
from vmckpt.capture.nbd.server import Server
from vmckpt.capture.nbd.session import Export
from vmckpt.errors import BadInput
from vmckpt.snapshot import partitions
from vmckpt.snapshot.partitions import Part
from vmckpt.units import Seconds

_EXT = "ext4"
_PACKAGES = {
    "debugfs": "e2fsprogs",
    "qemu-storage-daemon": "qemu-system-common",
    "setpriv": "util-linux",
}
_ROW = re.compile(r"/(\d+)/([0-7]{6})/(\d+)/(\d+)/(.*)/(\d*)/")
_TYPE = re.compile(r"Type: (\S+)")
_LINK = re.compile(r'Fast link dest: "(.*)"')
_WITHIN = Seconds(20.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file in a listing."""

    name: str
    mode: int
    size: int
    uid: int
    gid: int

    @property
    def folder(self) -> bool:
        return self.mode >> 12 == 0o04

    @property
    def regular(self) -> bool:
        return self.mode >> 12 == 0o10


def chosen(disk: str, found: Sequence[Part], number: int | None) -> Part:
    """Choose the partition that has the files: `number`, or else the only ext file system. Pure.

    Raises BadInput, with a list of all partitions, if the partition does not exist or there is no
    unique choice.
    """
    there = "; ".join(map(str, found))
    if number is not None:
        meant = next((one for one in found if one.number == number), None)
        if meant is None:
            raise BadInput(f"{disk} has no partition {number}", hint=f"choose one of {there}")
    else:
        known = [one for one in found if one.kind == _EXT]
        if len(known) > 1:
            raise BadInput(
                f"{disk} has several file systems: {there}",
                hint=f"choose one, for example --disk {disk}:{known[0].number}",
            )
        meant = known[0] if known else found[0]
    if meant.kind != _EXT:
        raise BadInput(
            f"cannot read files from {disk}: it has {there}; only ext2, ext3 and ext4 are"
            " supported",
            hint="serve the disk with --nbd, and read it with guestmount --ro or a virtual machine",
        )
    return meant


@contextmanager
def opened(export: Export, disk: str, number: int | None) -> Iterator["Files"]:
    """Open the files on a disk or in one of its partitions.

    `disk`: the disk's name, for messages; `number`: the partition's number; None: the disk's only
    file system. Raises BadInput, StoreError, OSError.
    """
    for program, package in _PACKAGES.items():
        if shutil.which(program) is None:
            raise BadInput(f"{program} is not installed on this machine", hint=f"install {package}")
    found = partitions.parts(lambda at, length: bytes(export.read(at, length)), export.size)
    part = chosen(disk, found, number)
    with tempfile.TemporaryDirectory(prefix="vmckpt-") as folder:
        place = Path(folder) / "nbd"
        with (
            Server({disk: export}, Unix(str(place))),
            _as_file(place, disk, part, Path(folder) / "disk") as path,
        ):
            yield Files(path)


@contextmanager
def _as_file(place: Path, disk: str, part: Part, path: Path) -> Iterator[Path]:
    path.touch()
    base = f"nbd,node-name=disk,server.type=unix,server.path={place},export={disk},read-only=on"
    window = f"raw,node-name=part,file=disk,offset={part.start},size={part.size},read-only=on"
    export = f"fuse,id=part,node-name=part,mountpoint={path},writable=off"
    words = ["qemu-storage-daemon", "--blockdev", base, "--blockdev", window, "--export", export]
    # If this process is killed, the daemon is terminated, too, and its mount disappears.
    with subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as daemon:  # fmt: skip
        try:
            _wait(daemon, path, part.size)
            yield path
        finally:
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.communicate(timeout=_WITHIN)
            daemon.kill()


def _wait(daemon: "subprocess.Popen[str]", path: Path, size: int) -> None:
    give_up = time.monotonic() + _WITHIN
    while path.stat().st_size != size:
        if daemon.poll() is not None or time.monotonic() > give_up:
            daemon.kill()
            said = daemon.communicate()[1].strip().splitlines()[-1:] or ["no error message"]
            raise BadInput(
                f"cannot export the disk as a file: {said[0]}",
                hint="check that /dev/fuse exists, and install fuse3 if you are not root",
            )
        time.sleep(0.02)


class Files:
    """The files of one file system."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk

    def list(self, path: str) -> tuple[Entry, ...]:
        """List a directory, sorted by name, or a single file. Raises BadInput."""
        kind = self._kind(path)
        if kind != "directory":
            folder, _, name = path.rstrip("/").rpartition("/")
            return tuple(one for one in self.list(folder or "/") if one.name == name)
        told = self._ask(f"ls -p {_quoted(path)}")
        found = [_entry(match) for line in told.splitlines() if (match := _ROW.fullmatch(line))]
        # No kernel creates such names; a manipulated disk could use them to escape the directory.
        found = [one for one in found if one.name not in (".", "..", "") and "/" not in one.name]
        return tuple(sorted(found, key=lambda one: one.name))

    def get(self, path: str, to: Path) -> tuple[Path, int]:
        """Copy a file, or a directory with all its files, to `to`.

        Only the current user can read the copy. Returns the copy's path and the number of entries
        omitted because they are neither files nor directories. Raises BadInput, OSError.
        """
        kind = self._kind(path)
        name = path.rstrip("/").rpartition("/")[2] or "disk"
        place = to / name if to.is_dir() else to
        if place.exists():
            raise BadInput(f"{place} already exists", hint="choose another path with --to")
        if kind == "directory":
            return place, self._folder(path, place)
        if kind != "regular":
            raise BadInput(
                f"{path} is a {kind}{self._leads(path)}; only files and directories can be copied"
            )
        self._file(path, place)
        return place, 0

    def _folder(self, path: str, place: Path) -> int:
        # debugfs's rdump is not used, as it follows symbolic links that it has just created.
        place.mkdir(mode=0o700)
        left_out = 0
        for one in self.list(path):
            inner, to = f"{path.rstrip('/')}/{one.name}", place / one.name
            if to.exists() or not (one.folder or one.regular):
                left_out += 1
            elif one.folder:
                left_out += self._folder(inner, to)
            else:
                self._file(inner, to)
        return left_out

    def _file(self, path: str, place: Path) -> None:
        self._ask(f"dump {_quoted(path)} {_quoted(str(place.absolute()))}")
        place.chmod(0o600)

    def read(self, path: str) -> bytes:
        """Return the content of a file. Raises BadInput, OSError."""
        with tempfile.TemporaryDirectory(prefix="vmckpt-") as folder:
            place, _ = self.get(path, Path(folder) / "file")
            if place.is_dir():
                raise BadInput(f"{path} is a directory", hint="copy the directory with --to")
            return place.read_bytes()

    def _kind(self, path: str) -> str:
        match = _TYPE.search(self._ask(f"stat {_quoted(path)}"))
        return match[1] if match else "file of unknown type"

    def _leads(self, path: str) -> str:
        match = _LINK.search(self._ask(f"stat {_quoted(path)}"))
        return f" to {match[1]}" if match else ""

    def _ask(self, request: str) -> str:
        done = subprocess.run(
            ["debugfs", "-R", request, str(self._disk)],
            capture_output=True, check=False, stdin=subprocess.DEVNULL,
            env={**os.environ, "DEBUGFS_PAGER": "cat", "LC_ALL": "C"},
        )  # fmt: skip
        said = done.stderr.decode(errors="replace").strip().splitlines()
        wrong = [line for line in said if not line.startswith("debugfs ")]
        if wrong or done.returncode:
            raise BadInput((wrong or [f"debugfs exited with status {done.returncode}"])[0].strip())
        return done.stdout.decode(errors="replace")


def _quoted(path: str) -> str:
    if any(not one.isprintable() for one in path) or '"' in path:
        raise BadInput(f"{path!r}: debugfs does not support this file name")
    return f'"{path}"'


def _entry(match: "re.Match[str]") -> Entry:
    return Entry(
        name=match[5], mode=int(match[2], 8), uid=int(match[3]), gid=int(match[4]),
        size=int(match[6] or 0),
    )  # fmt: skip
