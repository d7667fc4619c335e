"""Create and remove a standby on the backup: its images, its QEMU, its files.

An image is created for the standby, or existed before (`Disk.taken`). Existing images are checked
first, and are never removed.
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
from vmckpt.model.disk import is_locked
from vmckpt.replication.backup import standby_xml
from vmckpt.replication.session import Disk, Session, private_blocks, remove_folder
from vmckpt.units import Bytes, Seconds
from vmckpt.util import atomic_file, host_files
from vmckpt.util.host_files import Folder, path_of

_LIMIT = Seconds(20.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The result of inspecting the path of an image."""

    path: str
    there: bool = True
    regular: bool = True
    size: Bytes | None = None
    """The virtual size; None: the image cannot be read."""
    says: str = ""
    """Why the image cannot be read."""
    user: str = ""
    """Another guest that uses the image, directly or as a backing file."""


def inspect_image(path: str, format_: str) -> Image:
    """Inspect the file at `path` as an image in this format.

    An image that another process has locked counts as unreadable.
    """
    place = Path(path)
    if not place.exists():
        return Image(path=path, there=False)
    if not place.is_file():
        return Image(path=path, regular=False)
    words = ["qemu-img", "info", "--output=json", "-f", format_, "--", path]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_LIMIT)
        if done.returncode != 0:
            return Image(path=path, says=" ".join(done.stderr.split())[:200] or "no error message")
        told = json.loads(done.stdout)
        if told.get("format-specific", {}).get("data", {}).get("corrupt"):
            return Image(path=path, says="it is marked as corrupt")
        return Image(path=path, size=Bytes(int(told["virtual-size"])))
    except (OSError, ValueError, TypeError, LookupError, subprocess.TimeoutExpired) as exc:
        return Image(path=path, says=str(exc)[:200])


def why_not(image: Image, size: int) -> str | None:
    """Return why an image cannot be used for a disk of `size` bytes; None: it can. Pure."""
    if not image.there:
        return f"{image.path} does not exist"
    if not image.regular:
        return f"{image.path} is not a regular file"
    if image.user:
        return f"{image.path} is used by guest {image.user}"
    if image.size is None:
        if is_locked(image.says):
            return f"{image.path} is open in another process"
        return f"{image.path} cannot be read: {image.says}"
    if image.size != size:
        return f"{image.path} has {image.size} bytes, but the disk has {size}"
    return None


_WAITS = "inmigrate"
_MADE = "vmckpt-standby"
_OURS, _RAN, _SETTLED = "ours", "ran", "settled"
_LONGEST = 256
"""Maximum number of bytes read from a marker file; a session ID is far shorter."""
_IMAGES = "images.json"
"""Name of the file that lists the created images, in the directory that survives a reboot."""


def make(session: Session, xml: str) -> None:
    """Create or check the images, and start a QEMU that waits for the guest's state.

    `xml`: domain XML of the running guest. Raises BadInput, HypervisorError or OSError; images that
    were already created are then removed.
    """
    _note_images(session)
    images = {disk.target: disk.path for disk in session.disks}
    description = standby_xml.standby(
        xml, images, session.session, shares_memory=private_blocks(session) is not None
    )
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
    """Recheck an existing image right before it is overwritten. Raises BadInput."""
    why = why_not(inspect_image(disk.path, disk.format), disk.size)
    if why is not None:
        raise BadInput(
            f"{session.host}: {why}; it cannot be used for {disk.target}",
            hint=f"run vmckpt protect {session.name} --reverse again, which rechecks the images",
        )


def _image(session: Session, disk: Disk) -> Path:
    path = Path(disk.path)
    with Folder(path.parent, make=True) as folder:
        if folder.look(path.name) is not None and not _is_standbys(folder, path, session):
            raise BadInput(
                f"{session.host}: {path} already exists and is not a standby's image",
                hint="move the file away, or give another directory with --storage",
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
        why = done.stderr.strip().splitlines()[-1:] or ["no error message"]
        raise BadInput(f"{session.host}: {path} cannot be created: {why[0]}")
    return path


def _mark(path: Path) -> Path:
    """Return the path of the marker file beside an image. The file shows that the image belongs to
    a standby that never ran."""
    return path.with_name(f".{path.name}.{_MADE}")


def _is_standbys(folder: Folder, path: Path, session: Session) -> bool:
    """Return whether an image has a valid marker file of a standby.

    The file must be owned by root, since another user could mark any image. If a file server maps
    root to another user, the file must contain this session's ID.
    """
    seen = folder.look(_mark(path).name)
    if seen is None or not stat.S_ISREG(seen.st_mode):
        return False
    return host_files.is_ours(seen) or _marked_by(folder, path) == session.session


def _marked_by(folder: Folder, path: Path) -> str | None:
    """Return the session ID in the marker file of an image; None: the image is not marked."""
    try:
        return folder.read(_mark(path).name, _LONGEST).decode(errors="replace")
    except OSError:
        return None


def _forget(path: Path) -> None:
    with suppress(FileNotFoundError), Folder(path.parent) as folder:
        folder.remove(path.name)
        folder.remove(_mark(path).name)


def _note_images(session: Session) -> None:
    """Record which images were created for the standby: no other record survives a reboot."""
    made = [disk.path for disk in session.disks if not disk.taken]
    if session.state and made:
        folder = Path(session.state)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_file.put(folder / _IMAGES, json.dumps(made), private=True, for_good=True)


def forget_images(state: Path, session: str | None) -> list[str]:
    """After a reboot, remove the images created for a session's standby that never ran.

    `session`: the session's ID; None: not known, so no image is removed. Returns the paths of the
    removed images. Raises OSError.
    """
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
    """Record that the guest is about to run on the session's images, which must then be kept.

    Raises OSError.
    """
    (folder / _OURS).touch()
    for path in (Path(disk.path) for disk in session.disks):
        with suppress(FileNotFoundError), Folder(path.parent) as images:
            images.remove(_mark(path).name)


def is_ours(folder: Path) -> bool:
    """Return whether `adopt` was called: the guest was at least about to run on this host."""
    return (folder / _OURS).exists()


def note_settled(folder: Path) -> None:
    """Record that the guest is now an ordinary libvirt guest on this host. Raises OSError."""
    (folder / _SETTLED).touch()


def is_settled(folder: Path) -> bool:
    """Return whether `note_settled` was called; then the owner may change the definition."""
    return (folder / _SETTLED).exists()


def note_run(folder: Path) -> None:
    """Record that the guest is about to run. Call this right before its CPUs are started.

    Raises OSError.
    """
    (folder / _RAN).touch()


def may_have_run(folder: Path) -> bool:
    """Return whether the guest was started on this host, or was about to be."""
    return (folder / _RAN).exists()


def never_came_to_life(session: Session, folder: Path) -> bool:
    """Return whether the standby's QEMU is gone and its guest never ran.

    Such a guest does not belong to this host, even if this host was about to run it. Raises
    QemuUnclear.
    """
    return not may_have_run(folder) and not identity.runs(session.guest)


def waits(session: Session) -> bool:
    """Return whether the session's standby exists and has never run. Raises HypervisorError."""
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
    """Remove the standby. Returns what was done, for display.

    Raises OSError, and VmckptError, also if the guest was started on this host or was about to be,
    unless its QEMU is gone and never ran the guest.
    """
    did = []
    dead = never_came_to_life(session, folder)
    if is_ours(folder) and not dead:
        raise VmckptError(
            f"{session.name} may have run on {session.host}, so its standby was not removed",
            hint="run vmckpt recover",
        )
    if waits(session):
        with QmpMonitor(session.guest, host=session.host, uri=session.uri) as monitor:
            monitor.end()
        did.append("stopped the standby")
    if _runs_here(session):
        raise VmckptError(
            f"{session.name} is running on {session.host}, so its standby was not removed",
            hint="run vmckpt recover",
        )
    for disk in session.disks:
        if disk.taken:
            did.append(f"kept {disk.path}, which existed before")
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
    """Remove the session's files on tmpfs and on disk, but no images."""
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
