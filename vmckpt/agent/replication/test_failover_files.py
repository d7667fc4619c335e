"""Files of a failover test on the backup: recorded before they are created, and removed afterwards.

The record is on disk: after a reboot, only the record shows which files belong to the test.
"""

import json
import logging
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from vmckpt.agent.restore import replace_file
from vmckpt.errors import BadInput, HypervisorError, VmckptError
from vmckpt.hypervisor import connection
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.replication.session import Session
from vmckpt.replication.test_failover import disk_copy
from vmckpt.replication.test_failover.disk_copy import Fleece
from vmckpt.units import Seconds
from vmckpt.util import atomic_file
from vmckpt.util.host_files import Folder, opened, path_of

log = logging.getLogger("vmckpt.replica")

_FILE = "test.json"
_CHANGED, _OVERLAY, _NVRAM = "test-old", "test-new", "test-nvram"
_ENDS = Seconds(10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """The record of one failover test."""

    uuid: str
    """UUID of the test's guest."""
    name: str
    files: tuple[str, ...]

    def write(self, state: Path) -> None:
        """Write the record to disk. Raises OSError."""
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_file.put(state / _FILE, json.dumps(asdict(self)), for_good=True)

    @classmethod
    def read(cls, state: Path) -> Self | None:
        """Return the record; None if there is no test. Raises BadInput if it cannot be read."""
        try:
            told = json.loads((state / _FILE).read_text())
            return cls(**{**told, "files": tuple(told["files"])})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, OSError) as exc:
            raise BadInput(f"{state / _FILE} is invalid: {exc}") from exc


def changed(image: str) -> str:
    """Return the path of the image that preserves a standby's disk for the test.

    This image contains the old data of blocks that are overwritten in the standby's image.
    """
    return _beside(image, _CHANGED)


def overlay(image: str) -> str:
    """Return the path of the image that receives the test's writes."""
    return _beside(image, _OVERLAY)


def nvram(file: str) -> str:
    """Return the path of the test's copy of the NVRAM file."""
    return _beside(file, _NVRAM)


def _beside(image: str, what: str) -> str:
    path = Path(image)
    return str(path.with_name(f".{path.name}.vmckpt-{what}"))


def make_images(session: Session, fleeces: tuple[Fleece, ...], socket: Path) -> None:
    """Create the images of a test, whose overlays read from the NBD server at `socket`.

    Raises BadInput, OSError.
    """
    for disk, fleece in zip(session.disks, fleeces, strict=True):
        served = f"nbd+unix:///{fleece.export}?socket={socket}"
        _make(session, fleece.image, disk.size, owner=session.owner)
        _make(session, overlay(disk.path), disk.size, "-u", "-F", "raw", "-b", served)


def _make(
    session: Session, image: str, size: int, *words: str, owner: tuple[int, int] | None = None
) -> None:
    path = Path(image)
    with Folder(path.parent) as folder:
        file = folder.renew(path.name)
    try:
        command = ["qemu-img", "create", "-q", "-f", "qcow2", *words, "--", path_of(file)]
        done = subprocess.run(
            [*command, str(size)], capture_output=True, text=True, check=False, pass_fds=(file,)
        )
        if owner is not None:
            os.fchown(file, *owner)
    finally:
        os.close(file)
    if done.returncode != 0:
        why = done.stderr.strip().splitlines()[-1:] or ["no error message"]
        raise BadInput(f"{session.host}: creating an image for the test failed: {why[0]}")


def copy_firmware(firmware: str, own: str) -> None:
    """Copy the NVRAM file for the test. Raises OSError."""
    path = Path(own)
    with os.fdopen(opened(Path(firmware)), "rb") as source, Folder(path.parent) as folder:
        folder.write(path.name, source.read())


def kill(uuid: str) -> None:
    """Kill a test's QEMU, and wait until it is gone. Raises QemuUnclear."""
    process = identity.hold(uuid)
    if process is not None:
        with process:
            process.end(_ENDS)


def clear(session: Session) -> None:
    """Remove a test completely: its QEMU, its changes to the standby's QEMU, and its files.

    May be repeated. Raises VmckptError if something could not be removed.
    """
    state = Path(session.state)
    if not session.state or (found := Traces.read(state)) is None:
        return
    kill(found.uuid)
    _end(found.uuid, session)
    try:
        with QmpMonitor(session.guest, host=session.host, uri=session.uri) as monitor:
            disk_copy.end(monitor)
    except HypervisorError as exc:
        if exc.code not in connection.NOT_HERE:
            raise
    try:
        forget_files(state)
    except OSError as exc:
        raise VmckptError(
            f"{session.host}: removing the images of a failover test failed: {exc}"
        ) from exc
    log.info("removed the failover test %s", found.name)


def forget_files(state: Path) -> bool:
    """Remove the files of a test whose QEMU is gone. Returns whether there was a test.

    Raises BadInput, OSError.
    """
    found = Traces.read(state)
    if found is None:
        return False
    for file in found.files:
        replace_file.remove(Path(file))
    (state / _FILE).unlink(missing_ok=True)
    return True


def _end(uuid: str, session: Session) -> None:
    """Destroy the test guest through libvirt.

    libvirt may be starting a QEMU process that `kill` cannot see yet.
    """
    try:
        with QmpMonitor(uuid, host=session.host, uri=session.uri) as monitor:
            monitor.end()
    except HypervisorError as exc:
        if exc.code not in connection.NOT_HERE:
            raise
