"""Create and remove a standby on the backup: its images, its QEMU, its files.

Images are created for it, or were there before (`Disk.taken`): those are examined first, and are
never removed.
"""

import json
import os
import shutil
import stat
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vmckpt.errors import BadInput, HypervisorError, VmckptError
from vmckpt.hypervisor import connection
from vmckpt.hypervisor import standby_domain as libvirt_side
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.replication.backup import standby_xml
from vmckpt.replication.session import Disk, Session, remove_folder
from vmckpt.units import Bytes, Seconds
from vmckpt.util import atomic_file, host_files
from vmckpt.util.host_files import Folder, path_of

_LIMIT = Seconds(20.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What is at a path."""

    path: str
    there: bool = True
    regular: bool = True
    size: Bytes | None = None
    """As a guest would see it; None: it cannot be read."""
    says: str = ""
    """Why it cannot."""
    user: str = ""
    """Another guest whose image it is, or lies below."""


def inspect_image(path: str, format_: str) -> Image:
    """What is there, if it is an image of that format which nobody has open."""
    place = Path(path)
    if not place.exists():
        return Image(path=path, there=False)
    if not place.is_file():
        return Image(path=path, regular=False)
    words = ["qemu-img", "info", "--output=json", "-f", format_, "--", path]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_LIMIT)
        if done.returncode != 0:
            return Image(path=path, says=" ".join(done.stderr.split())[:200] or "no word")
        told = json.loads(done.stdout)
        if told.get("format-specific", {}).get("data", {}).get("corrupt"):
            return Image(path=path, says="it is marked as damaged")
        return Image(path=path, size=Bytes(int(told["virtual-size"])))
    except (OSError, ValueError, TypeError, LookupError, subprocess.TimeoutExpired) as exc:
        return Image(path=path, says=str(exc)[:200])


def why_not(image: Image, size: int) -> str | None:
    """Why it cannot be the image of a disk of so many bytes; None: it can. Pure."""
    if not image.there:
        return f"{image.path} is gone"
    if not image.regular:
        return f"{image.path} is no file"
    if image.user:
        return f"{image.path} is used by guest {image.user}"
    if image.size is None:
        busy = "lock" in image.says
        return f"{image.path} is open in another program" if busy else (
            f"{image.path} cannot be read: {image.says}"
        )  # fmt: skip
    if image.size != size:
        return f"{image.path} has {image.size} bytes, and the disk {size}"
    return None


_WAITS = "inmigrate"
_MADE = "vmckpt-standby"
_OURS, _RAN, _SETTLED = "ours", "ran", "settled"
_LONGEST = 256
"""Bytes of a mark; a session's ID is far shorter."""
_IMAGES = "images.json"
"""In the folder that outlives a reboot."""


def make(session: Session, xml: str) -> None:
    """Make or take the images and start a QEMU that waits. Nothing is left of it if that fails.

    `xml`: the running guest's. Raises BadInput, HypervisorError.
    """
    _note_images(session)
    images = {disk.target: disk.path for disk in session.disks}
    description = standby_xml.standby(xml, images, session.session)
    made: list[Path] = []
    try:
        for disk in session.disks:
            if disk.taken:
                _check(session, disk)
            else:
                made.append(_image(session, disk))
        libvirt_side.create_paused(description, host=session.host, uri=session.uri)
    except BaseException:
        for path in made:
            _forget(path)
        raise


def _check(session: Session, disk: Disk) -> None:
    """An image that was there before is looked at once more, right before it is written to."""
    why = why_not(inspect_image(disk.path, disk.format), disk.size)
    if why is not None:
        raise BadInput(
            f"{session.host}: {why}; it cannot be taken for {disk.target}",
            hint="protect the guest again: what is there is looked at anew",
        )


def _image(session: Session, disk: Disk) -> Path:
    path = Path(disk.path)
    with Folder(path.parent, make=True) as folder:
        if folder.look(path.name) is not None and not _is_standbys(folder, path, session):
            raise BadInput(
                f"{session.host}: {path} is there already, and is no standby's image",
                hint="move it away, or name another folder with --storage",
            )
        folder.write(_mark(path).name, session.session.encode())
        file = folder.renew(path.name)
    try:
        command = ["qemu-img", "create", "-q", "-f", disk.format, path_of(file), str(disk.size)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, pass_fds=(file,)
        )
    finally:
        os.close(file)
    if done.returncode != 0:
        _forget(path)
        why = done.stderr.strip().splitlines()[-1:] or ["no word"]
        raise BadInput(f"{session.host}: {path} cannot be made: {why[0]}")
    return path


def _mark(path: Path) -> Path:
    """A file beside an image, as long as that is a standby's which never ran."""
    return path.with_name(f".{path.name}.{_MADE}")


def _is_standbys(folder: Folder, path: Path, session: Session) -> bool:
    """Whether an image is marked as a standby's, by us: another user could mark any image.

    Where a server of files makes all that is root's another user's, this session's ID proves it.
    """
    seen = folder.look(_mark(path).name)
    if seen is None or not stat.S_ISREG(seen.st_mode):
        return False
    return host_files.is_ours(seen) or _marked_by(folder, path) == session.session


def _marked_by(folder: Folder, path: Path) -> str | None:
    """The session whose standby's image that is; None: it is not marked."""
    try:
        return folder.read(_mark(path).name, _LONGEST).decode(errors="replace")
    except OSError:
        return None


def _forget(path: Path) -> None:
    with suppress(FileNotFoundError), Folder(path.parent) as folder:
        folder.remove(path.name)
        folder.remove(_mark(path).name)


def _note_images(session: Session) -> None:
    """Of images that are made for it: nothing else is known of them once its host has rebooted."""
    made = [disk.path for disk in session.disks if not disk.taken]
    if session.state and made:
        folder = Path(session.state)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_file.put(folder / _IMAGES, json.dumps(made), private=True, for_good=True)


def forget_images(state: Path, session: str | None) -> list[str]:
    """After a reboot: remove images that were made for a session's standby and never ran; which."""
    try:
        noted = [Path(one) for one in json.loads((state / _IMAGES).read_text())]
    except (OSError, ValueError):
        return []
    gone = []
    for path in noted:
        with suppress(OSError), Folder(path.parent) as folder:
            if session is not None and _marked_by(folder, path) == session:
                _forget(path)
                gone.append(str(path))
    (state / _IMAGES).unlink(missing_ok=True)
    return gone


def adopt(session: Session, folder: Path) -> None:
    """The guest is to run on these images: from now on they are nobody's to remove."""
    (folder / _OURS).touch()
    for path in (Path(disk.path) for disk in session.disks):
        with suppress(FileNotFoundError), Folder(path.parent) as images:
            images.remove(_mark(path).name)


def is_ours(folder: Path) -> bool:
    """Whether the guest runs here, or was to."""
    return (folder / _OURS).exists()


def note_settled(folder: Path) -> None:
    """libvirt describes the guest as an ordinary one of this host."""
    (folder / _SETTLED).touch()


def is_settled(folder: Path) -> bool:
    """Whether it does: what is stored of it is its owner's to change since."""
    return (folder / _SETTLED).exists()


def note_run(folder: Path) -> None:
    """Right before its CPUs are started."""
    (folder / _RAN).touch()


def may_have_run(folder: Path) -> bool:
    """Whether the guest was let run here, or was about to be."""
    return (folder / _RAN).exists()


def never_came_to_life(session: Session, folder: Path) -> bool:
    """Whether its QEMU is gone, and nothing ever ran in it: the guest was to run here, and is no
    guest of this host."""
    return not may_have_run(folder) and not identity.runs(session.guest)


def waits(session: Session) -> bool:
    """Whether the session's standby is there and has never run. Raises HypervisorError."""
    try:
        with QmpMonitor(session.guest, host=session.host, uri=session.uri) as monitor:
            return (
                standby_xml.marked(monitor.described()) == session.session
                and monitor.run_state() == _WAITS
            )
    except HypervisorError as exc:
        if exc.code in connection.NOT_HERE:
            return False
        raise


def remove(session: Session, folder: Path) -> tuple[str, ...]:
    """Take the standby away, if it still is one; what was done. Raises VmckptError."""
    did = []
    dead = never_came_to_life(session, folder)
    if is_ours(folder) and not dead:
        raise VmckptError(
            f"{session.name} was to run on {session.host}: it is no standby, and is left alone",
            hint="run vmckpt recover",
        )
    if waits(session):
        with QmpMonitor(session.guest, host=session.host, uri=session.uri) as monitor:
            monitor.end()
        did.append("ended the standby")
    if _runs_here(session):
        raise VmckptError(
            f"{session.name} runs on {session.host}: it is no standby, and is left alone",
            hint="run vmckpt recover",
        )
    for disk in session.disks:
        if disk.taken:
            did.append(f"left {disk.path}, which was there before")
        elif _was_made(session, Path(disk.path)) or (dead and is_ours(folder)):
            _forget(Path(disk.path))
            did.append(f"removed {disk.path}")
    clear(session, folder)
    return tuple(did)


def _was_made(session: Session, path: Path) -> bool:
    with suppress(FileNotFoundError), Folder(path.parent) as folder:
        return _is_standbys(folder, path, session)
    return False


def clear(session: Session, folder: Path) -> None:
    """Remove the session's files."""
    if session.state:
        shutil.rmtree(session.state, ignore_errors=True)
    remove_folder(folder)


def _runs_here(session: Session) -> bool:
    try:
        with QmpMonitor(session.guest, host=session.host, uri=session.uri) as monitor:
            return monitor.is_active()
    except HypervisorError as exc:
        if exc.code in connection.NOT_HERE:
            return False
        raise
