"""Create a userfaultfd(2) for the memory of another process, by a system call in that process.

A userfaultfd belongs to the memory of the process that created it. So QEMU creates it, and vmckpt
duplicates it with pidfd_getfd(2). With `create`, QEMU then closes its own descriptor: if vmckpt's
process dies, the kernel closes the last descriptor and removes every registration. With
`create_inside`, QEMU keeps its descriptor, and with it the registrations.
"""

import ctypes
import errno
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path

from vmckpt.hypervisor.qemu_process import descriptor_passing, injection
from vmckpt.hypervisor.qemu_process.architecture import ARCHITECTURES
from vmckpt.hypervisor.qemu_process.injection import Stopped
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.units import Seconds

_PIDFD_GETFD = 438  # on all architectures
_USER_MODE_ONLY = 1
_KIND = "anon_inode:[userfaultfd]"
_DEVICE = "/dev/userfaultfd"
_NEW = 0xAA00  # USERFAULTFD_IOC_NEW
# `API: version:features:known features`, hexadecimal. The features are zero until UFFDIO_API.
_UNUSED = re.compile(r"^API:\s+[0-9a-f]+:0:", re.MULTILINE)
_OPENING = Seconds(0.02)
"""QEMU enables a userfaultfd within this time after creating it."""


def create(process: HeldProcess) -> int:
    """Create a userfaultfd for a process's memory. Returns a descriptor in the calling process.

    The userfaultfd reports only faults in user mode, so the process needs no privileges. The kernel
    resolves write-protection faults itself, in both modes, if WP_ASYNC is enabled.

    Raises CannotInject; OSError if the kernel refuses the userfaultfd, or its duplication.
    """

    def work(stopped: Stopped) -> int:
        inside = stopped.syscall("userfaultfd", os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
        try:
            return duplicate(process, inside)
        finally:
            stopped.syscall("close", inside)

    close_unused(process)
    return injection.run(process, work)


def create_inside(process: HeldProcess) -> int:
    """Create a userfaultfd that also reports faults in kernel mode, and leave it in the process.

    Returns its number in the process. Faults in kernel mode are those of KVM and of system calls
    that QEMU makes with the guest's memory. Without privileges, a process may create such a
    userfaultfd only from /dev/userfaultfd (Linux 6.1), which is passed to it, or if the sysctl
    vm.unprivileged_userfaultfd is 1.

    Raises CannotInject; OSError if the kernel refuses the userfaultfd.
    """
    close_unused(process)
    flags = os.O_CLOEXEC | os.O_NONBLOCK
    try:
        device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return injection.run(process, lambda stopped: stopped.syscall("userfaultfd", flags))
    try:
        with descriptor_passing.offered(process, device) as handover:

            def work(stopped: Stopped) -> int:
                inside = handover.receive(stopped)
                try:
                    return stopped.syscall("ioctl", inside, _NEW, flags)
                finally:
                    stopped.syscall("close", inside)

            return injection.run(process, work)
    finally:
        os.close(device)


def close_inside(process: HeldProcess, number: int) -> None:
    """Close a userfaultfd that `create_inside` left in the process.

    Raises CannotInject, OSError.
    """
    injection.run(process, lambda stopped: stopped.syscall("close", number))


def of_this_process() -> int:
    """Return a new userfaultfd of this process.

    Raises OSError, also if the CPU architecture is not supported.
    """
    known = ARCHITECTURES.get(platform.machine())
    if known is None:
        raise OSError(
            errno.ENOTSUP, f"userfaultfd is not supported on CPU architecture {platform.machine()}"
        )
    library = ctypes.CDLL(None, use_errno=True)
    made = library.syscall(
        known.numbers["userfaultfd"], os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY
    )
    if made < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"userfaultfd: {os.strerror(code)}")
    return int(made)


def close_unused(process: HeldProcess) -> int:
    """Close userfaultfds that a killed `create` left in the process. Returns their number.

    Such a userfaultfd has not been enabled by UFFDIO_API, and so has no effect. QEMU enables its
    own immediately after creating them. Raises CannotInject, OSError.
    """
    before = set(_unused(process))
    if not before:
        return 0
    time.sleep(_OPENING)

    def work(stopped: Stopped) -> int:
        found = before & set(_unused(process))
        for number in found:
            stopped.syscall("close", number)
        return len(found)

    return injection.run(process, work)


def opened(process: HeldProcess) -> Iterator[int]:
    """Yield the numbers of a process's userfaultfds in that process. Raises OSError."""
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            kind = str(link.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
        if kind == _KIND:
            yield int(link.name)


def duplicate(process: HeldProcess, number: int) -> int:
    """Return a duplicate of a process's descriptor, to be closed by the caller. Raises OSError.

    `number`: the descriptor in `process`.
    """
    library = ctypes.CDLL(None, use_errno=True)
    copy = library.syscall(_PIDFD_GETFD, process.pidfd, number, 0)
    if copy < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"pidfd_getfd: {os.strerror(error)}")
    return int(copy)


def _unused(process: HeldProcess) -> Iterator[int]:
    for number in opened(process):
        try:
            text = Path(f"/proc/{process.pid}/fdinfo/{number}").read_text()
        except FileNotFoundError:
            continue
        if _UNUSED.search(text):
            yield number
