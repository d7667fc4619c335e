"""Identify the QEMU process of a guest on this host.

Any local user can start a process with any command line, so a command line proves nothing. The
process ID comes from libvirt's status files of running guests, which only root can write. The
process is accepted as the guest's QEMU if its user, command line and open monitor socket match
libvirt's record, and its executable is the recorded emulator or has a name like that of QEMU.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

from vmckpt.errors import CannotCapture, QemuUnclear
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess

STATUS_FILES = Path("/run/libvirt/qemu")
"""libvirt's stateDir, with NAME.xml and NAME.pid of each running guest."""
_LIBRARY = Path("/var/lib/libvirt/qemu")
"""A directory whose owner is QEMU's user, as set by libvirt."""
_DELETED = " (deleted)"
_LAST_PID = 1 << 22
"""The highest process ID that Linux permits (PID_MAX_LIMIT)."""
_ENDED = (errno.ENOENT, errno.ESRCH)
"""Errors from /proc files that mean that the process has terminated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A running guest according to libvirt's status file."""

    pid: int
    guest: str
    """The guest's UUID."""
    emulator: str
    user: int | None
    """ID of QEMU's user; None: libvirt does not label processes."""
    monitor: str
    """Path of the monitor's socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """A process according to the kernel."""

    users: frozenset[int]
    """The process's real, effective, saved and file system user IDs."""
    executable: str
    command: tuple[str, ...]
    sockets: frozenset[str]
    """Paths of the Unix sockets that were looked for and that the process has open."""


def recorded(text: str) -> Recorded:
    """Parse libvirt's status file (a `domstatus` element). Raises ValueError."""
    try:
        root = ET.fromstring(text)
    except ET.ParseError as exc:
        raise ValueError(f"not a status file of libvirt: {exc}") from exc
    monitor = root.find("monitor")
    guest = root.findtext("domain/uuid")
    if root.tag != "domstatus" or monitor is None or guest is None:
        raise ValueError("not a status file of libvirt")
    user = None
    for label in root.findall("domain/seclabel"):
        if label.get("model") == "dac" and (named := label.findtext("label")):
            user = int(named.partition(":")[0].lstrip("+"))
    return Recorded(
        pid=int(root.get("pid", "0")), guest=guest, user=user,
        emulator=root.findtext("domain/devices/emulator", ""), monitor=monitor.get("path", ""),
    )  # fmt: skip


def mismatch(known: Recorded, seen: ProcessFacts) -> str | None:
    """Return why a process is not the recorded QEMU; None if it is. Pure."""
    if known.user is not None and seen.users != {known.user}:
        return f"it runs as user {_listed(seen.users)}, not as QEMU's user {known.user}"
    executable = seen.executable.removesuffix(_DELETED)
    # The emulator may be a script that starts another program, like Debian's /usr/bin/kvm.
    if executable != known.emulator and not Path(executable).name.startswith("qemu"):
        return f"it runs {executable}, not {known.emulator}"
    if not _names(seen.command, known.guest):
        return "its command line does not name the guest"
    if known.monitor not in seen.sockets:
        return f"it does not have the monitor socket {known.monitor} open"
    return None


def is_stray(seen: ProcessFacts, guest: str, trusted: frozenset[int]) -> bool:
    """Return whether a process that libvirt did not record may run the guest. Pure.

    `trusted`: IDs of the users that QEMU may run as. Processes of other users are imitations; a
    setuid program still has its caller as the real user.
    """
    return (
        seen.users <= trusted
        and Path(seen.executable.removesuffix(_DELETED)).name.startswith("qemu")
        and _names(seen.command, guest)
    )


def _names(command: tuple[str, ...], guest: str) -> bool:
    return any(a == "-uuid" and b == guest for a, b in pairwise(command))


def _listed(users: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(users)))


def runs(guest: str) -> bool:
    """Return whether a guest (a UUID) has a QEMU process on this host. Raises QemuUnclear."""
    process = hold(guest)
    if process is None:
        return False
    process.close()
    return True


def hold(guest: str) -> HeldProcess | None:
    """Return the QEMU process of a guest (a UUID) on this host; None if there is none.

    The caller must close the result. A process unknown to libvirt may also run the guest, for
    example after libvirt lost its files, so each call searches all processes. The search takes 20
    µs per process. It runs once per action, and never while a guest is paused or a lease is
    renewed. Raises QemuUnclear if several processes may be the guest's QEMU, if the process is
    unknown to libvirt, or if the files in /proc or of libvirt cannot be read.
    """
    found = [one for known in _recorded(guest) if (one := _verified(known)) is not None]
    try:
        strays = _strays(guest, {one.pid for one in found})
    except BaseException:
        _close(found)
        raise
    if len(found) == 1 and not strays:
        return found[0]
    _close(found)
    if not found and not strays:
        return None
    ids = ", ".join(str(one) for one in sorted([*strays, *(one.pid for one in found)]))
    if found:
        raise _unclear(
            f"more than one process may be the QEMU of guest {guest}: {ids}",
            hint=f"kill the process whose ID is not in {STATUS_FILES}/*.pid, then try again",
        )
    raise _unclear(
        f"guest {guest} is running in process {ids}, which is unknown to libvirt",
        hint="kill that process if it is not needed, then try again",
    )


def require(guest: str, name: str, host: str) -> HeldProcess:
    """Return the QEMU process of a guest (a UUID) that must run on this host.

    `name` and `host` are for messages. Raises CannotCapture if the guest has no QEMU process here,
    QemuUnclear as `hold` does.
    """
    process = hold(guest)
    if process is None:
        raise CannotCapture(
            f"{name} has no QEMU process on {host}",
            hint=f"run vmckpt guests to see whether {name} is running, and on which host",
        )
    return process


def _unclear(message: str, *, hint: str) -> QemuUnclear:
    return QemuUnclear(message, host=os.uname().nodename, hint=hint)


def _close(processes: list[HeldProcess]) -> None:
    for one in processes:
        one.close()


def _recorded(guest: str) -> Iterator[Recorded]:
    """Yield the guests with this UUID from libvirt's status files. Raises QemuUnclear."""
    try:
        files = sorted(STATUS_FILES.glob("*.xml"))
        if files:
            _must_be_roots(STATUS_FILES, STATUS_FILES.stat())
        for file in files:
            with suppress(FileNotFoundError):
                text = _read(file)
                if guest in text and (known := recorded(text)).guest == guest:
                    yield known
    except PermissionError as exc:
        raise _unclear(
            f"only root can identify the QEMU process: {exc}",
            hint="let vmckpt log in to that host as root: ssh: {user: root} in the inventory",
        ) from exc
    except (OSError, ValueError) as exc:
        raise _unclear(
            f"cannot identify the QEMU process from {STATUS_FILES}: {exc}",
            hint=f"run ls -l {STATUS_FILES} on that host",
        ) from exc


def _read(file: Path) -> str:
    opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(opened, encoding="utf-8", errors="replace") as text:
        _must_be_roots(file, os.fstat(opened))
        return text.read()


def _must_be_roots(path: Path, seen: os.stat_result) -> None:
    """Raise ValueError unless only root can write to the file or directory."""
    if seen.st_uid != 0 or seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"users other than root can write to {path}")


def _verified(known: Recorded) -> HeldProcess | None:
    """Return the recorded process; None if it has terminated or does not match the record.

    Raises QemuUnclear.
    """
    if not 0 < known.pid <= _LAST_PID:
        return None
    try:
        process = HeldProcess(known.pid)
    except OSError as exc:
        if exc.errno in _ENDED:
            return None
        raise _hidden(known.pid, exc) from exc
    try:
        seen = _seen(known.pid, {known.monitor})
        # If libvirt records no user, the process must run as a user that QEMU may run as.
        trusted = known.user is not None or seen.users <= _trusted()
        if trusted and mismatch(known, seen) is None and process.lives():
            return process
    except OSError as exc:
        if exc.errno not in _ENDED:
            process.close()
            raise _hidden(known.pid, exc) from exc
    except BaseException:
        process.close()
        raise
    process.close()
    return None


def _hidden(pid: int, error: OSError) -> QemuUnclear:
    return _unclear(
        f"cannot determine whether process {pid} is the guest's QEMU: {error}",
        hint=f"run ls -l /proc/{pid}/exe as root on that host to see what prevents access",
    )


def _strays(guest: str, but: set[int]) -> list[int]:
    """Return the IDs of processes other than `but` that may run the guest. Raises QemuUnclear."""
    mark, trusted = b"\0-uuid\0" + guest.encode() + b"\0", _trusted()
    found = []
    # Not glob: it fails if a process ends while it looks for the process's file.
    for pid in (int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()):
        try:
            if pid in but or mark not in Path(f"/proc/{pid}/cmdline").read_bytes():
                continue
            # The user is checked first: the other files of an imitation may be unreadable.
            if _users(pid) <= trusted and is_stray(_seen(pid, set()), guest, trusted):
                found.append(pid)
        except OSError as exc:
            if exc.errno not in _ENDED:
                raise _hidden(pid, exc) from exc
    return found


def _trusted() -> frozenset[int]:
    """Return the IDs of the users that QEMU may run as: root and libvirt's QEMU user."""
    try:
        return frozenset({0, _LIBRARY.stat().st_uid})
    except OSError:
        return frozenset({0})


def _seen(pid: int, sockets: set[str]) -> ProcessFacts:
    """Read facts about a process. `sockets`: the paths to look for. Raises OSError."""
    where = Path(f"/proc/{pid}")
    users = _users(pid)
    command = (where / "cmdline").read_bytes().decode(errors="surrogateescape").split("\0")
    held = frozenset(_held(where, sockets)) if sockets else frozenset()
    return ProcessFacts(
        users=users, executable=str((where / "exe").readlink()),
        command=tuple(command), sockets=held,
    )  # fmt: skip


def _users(pid: int) -> frozenset[int]:
    """Return a process's real, effective, saved and file system user ID. Raises OSError."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("Uid:"))
    return frozenset(map(int, line.split()[1:]))


def _held(process: Path, wanted: set[str]) -> Iterator[str]:
    """Yield each path in `wanted` whose socket the process has open."""
    own = set()
    for file in (process / "fd").iterdir():
        with suppress(FileNotFoundError):
            own.add(str(file.readlink()))
    for line in (process / "net/unix").read_text(errors="replace").splitlines()[1:]:
        words = line.split(maxsplit=7)
        if len(words) == 8 and words[7] in wanted and f"socket:[{words[6]}]" in own:
            yield words[7]
