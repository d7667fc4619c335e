"""Identify the QEMU process of a guest on this host.

Any local user can start a process with any command line, so a command line proves nothing. The
process ID comes from the files that libvirt keeps about running guests, which only root can write.
That process is taken for the guest's QEMU if its user, executable, command line and the monitor
socket that it holds open are the ones that libvirt recorded.
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
"""libvirt's stateDir: NAME.xml and NAME.pid for each running guest."""
_LIBRARY = Path("/var/lib/libvirt/qemu")
"""libvirt gives this folder to the user as whom it runs QEMU."""
_DELETED = " (deleted)"
_LAST_PID = 1 << 22
"""Linux's PID_MAX_LIMIT."""
_ENDED = (errno.ENOENT, errno.ESRCH)
"""What files of a process that has ended answer; any other error tells nothing about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What libvirt's status file says about one running guest."""

    pid: int
    guest: str
    """Its UUID."""
    emulator: str
    user: int | None
    """As whom QEMU runs; None: libvirt does not label processes."""
    monitor: str
    """Path of the monitor's socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """What the kernel says about one process."""

    users: frozenset[int]
    """Its real, effective, saved and file system user."""
    executable: str
    command: tuple[str, ...]
    sockets: frozenset[str]
    """Paths of the Unix sockets that it holds open."""


def recorded(text: str) -> Recorded:
    """Read libvirt's status file (a `domstatus` element).

    Raises ValueError if that is not one.
    """
    try:
        root = ET.fromstring(text)
    except ET.ParseError as exc:
        raise ValueError(f"no status of a guest: {exc}") from exc
    monitor = root.find("monitor")
    guest = root.findtext("domain/uuid")
    if root.tag != "domstatus" or monitor is None or guest is None:
        raise ValueError("no status of a guest")
    user = None
    for label in root.findall("domain/seclabel"):
        if label.get("model") == "dac" and (named := label.findtext("label")):
            user = int(named.partition(":")[0].lstrip("+"))
    return Recorded(
        pid=int(root.get("pid", "0")), guest=guest, user=user,
        emulator=root.findtext("domain/devices/emulator", ""), monitor=monitor.get("path", ""),
    )  # fmt: skip


def mismatch(known: Recorded, seen: ProcessFacts) -> str | None:
    """Why a process is not the recorded QEMU; None if it is. Pure."""
    if known.user is not None and seen.users != {known.user}:
        return f"it runs as user {_listed(seen.users)}, and QEMU runs as {known.user}"
    executable = seen.executable.removesuffix(_DELETED)
    # The emulator may be a script that starts another program, as Debian's /usr/bin/kvm.
    if executable != known.emulator and not Path(executable).name.startswith("qemu"):
        return f"it runs {executable}, and not {known.emulator}"
    if not _names(seen.command, known.guest):
        return "its command line does not name the guest"
    if known.monitor not in seen.sockets:
        return f"it does not hold {known.monitor}, libvirt's connection to QEMU"
    return None


def is_stray(seen: ProcessFacts, guest: str, trusted: frozenset[int]) -> bool:
    """Whether a process that libvirt did not record may run the guest all the same. Pure.

    `trusted`: users as whom QEMU may run here. Processes of other users are imitations, and a
    program that changes its user still has its caller's as the real one.
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
    """Whether a guest (a UUID) has a QEMU process on this host. Raises QemuUnclear."""
    process = hold(guest)
    if process is None:
        return False
    process.close()
    return True


def hold(guest: str) -> HeldProcess | None:
    """The QEMU process of a guest (a UUID) on this host, to be closed; None: it has none.

    A process that libvirt does not know may run the guest as well, as after libvirt lost its files:
    each call looks for one among all processes. That takes 20 µs a process, and each action asks
    once: no pause of a guest and no renewal of a lease contains it. Raises QemuUnclear if more than
    one process can be it, or one that libvirt does not know.
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
            f"more than one process can be QEMU of guest {guest}: {ids}",
            hint="end the one that is not in virsh list, then try again",
        )
    raise _unclear(
        f"libvirt does not know process {ids}, which runs guest {guest}",
        hint="end that process if it is not needed, then try again",
    )


def require(guest: str, name: str, host: str) -> HeldProcess:
    """The same, where the guest must run. Raises CannotCapture as well."""
    process = hold(guest)
    if process is None:
        raise CannotCapture(
            f"{name} has no QEMU process on {host}", hint="name the host where it runs"
        )
    return process


def _unclear(message: str, *, hint: str) -> QemuUnclear:
    return QemuUnclear(message, host=os.uname().nodename, hint=hint)


def _close(processes: list[HeldProcess]) -> None:
    for one in processes:
        one.close()


def _recorded(guest: str) -> Iterator[Recorded]:
    """What libvirt says about guests of that UUID. Raises QemuUnclear."""
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
            f"only root can tell which process is QEMU: {exc}", hint="log in as root there"
        ) from exc
    except (OSError, ValueError) as exc:
        raise _unclear(
            f"{STATUS_FILES} does not tell which process is QEMU: {exc}",
            hint=f"see what is there: ls -l {STATUS_FILES}",
        ) from exc


def _read(file: Path) -> str:
    opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(opened, encoding="utf-8", errors="replace") as text:
        _must_be_roots(file, os.fstat(opened))
        return text.read()


def _must_be_roots(path: Path, seen: os.stat_result) -> None:
    """Raises ValueError if others than root may have written there."""
    if seen.st_uid != 0 or seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"others than root may write to {path}")


def _verified(known: Recorded) -> HeldProcess | None:
    """The recorded process; None if it has ended. Raises QemuUnclear."""
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
        # Where libvirt records no user, it must be one as whom QEMU may run at all.
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
        f"whether process {pid} is QEMU of the guest cannot be seen: {error}",
        hint=f"see what keeps root from it: ls -l /proc/{pid}/exe",
    )


def _strays(guest: str, but: set[int]) -> list[int]:
    """Raises QemuUnclear."""
    mark, trusted = b"\0-uuid\0" + guest.encode() + b"\0", _trusted()
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        pid = int(command.parent.name)
        try:
            if pid in but or mark not in command.read_bytes():
                continue
            # An imitation's other files may be hidden, and tell nothing of interest.
            if _users(pid) <= trusted and is_stray(_seen(pid, set()), guest, trusted):
                found.append(pid)
        except OSError as exc:
            if exc.errno not in _ENDED:
                raise _hidden(pid, exc) from exc
    return found


def _trusted() -> frozenset[int]:
    """Users as whom QEMU may run: root, and libvirt's user for it."""
    try:
        return frozenset({0, _LIBRARY.stat().st_uid})
    except OSError:
        return frozenset({0})


def _seen(pid: int, sockets: set[str]) -> ProcessFacts:
    """Look at a process; of its sockets those at the given paths. Raises OSError."""
    where = Path(f"/proc/{pid}")
    users = _users(pid)
    command = (where / "cmdline").read_bytes().decode(errors="surrogateescape").split("\0")
    held = frozenset(_held(where, sockets)) if sockets else frozenset()
    return ProcessFacts(
        users=users, executable=str((where / "exe").readlink()),
        command=tuple(command), sockets=held,
    )  # fmt: skip


def _users(pid: int) -> frozenset[int]:
    """The real, effective, saved and file system's user of a process. Raises OSError."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("Uid:"))
    return frozenset(map(int, line.split()[1:]))


def _held(process: Path, wanted: set[str]) -> Iterator[str]:
    """Those of the paths at which a socket lies that the process has open."""
    own = set()
    for file in (process / "fd").iterdir():
        with suppress(FileNotFoundError):
            own.add(str(file.readlink()))
    for line in (process / "net/unix").read_text(errors="replace").splitlines()[1:]:
        words = line.split(maxsplit=7)
        if len(words) == 8 and words[7] in wanted and f"socket:[{words[6]}]" in own:
            yield words[7]
