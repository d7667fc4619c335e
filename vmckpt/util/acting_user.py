"""Find the user on whose behalf this process acts, also if the user became root with sudo or su.

Linux only, because it reads /proc. What the kernel says has precedence. Root can forge all of it,
and needs none of it: root can do without vmckpt whatever vmckpt does.
"""

import grp
import os
import pwd
from functools import cache
from pathlib import Path

from vmckpt.model.roles import ActingUser

_PROC = Path("/proc")
_UNSET = 4294967295
"""The login user ID of a process that no login session started."""
_DEEPEST = 100


@cache
def acting_user(proc: Path = _PROC) -> ActingUser:
    """Return the acting user, with the names of the user's groups.

    This is the process's real user. If that is root, it is the first of these users that is not
    root: the user that logged in (the kernel's login user ID, which sudo and su keep), the real
    user of the nearest parent process, and SUDO_USER. If there is none, root acts itself.

    The first call determines the user for the life of the process, since parent processes may end.
    `proc` replaces /proc.
    """
    uid = os.getuid() or _login(proc) or _parent(proc)
    if uid:
        return _named(uid)
    name = os.environ.get("SUDO_USER", "root")
    try:
        return _named(pwd.getpwnam(name).pw_uid)
    except KeyError:  # a user that does not exist has no role
        return ActingUser(name=name, groups=frozenset())


def _login(proc: Path) -> int | None:
    """Return the ID of the user that logged in; None: unknown."""
    try:
        uid = int((proc / "self/loginuid").read_text())
    except (OSError, ValueError):  # a kernel without auditing
        return None
    return None if uid == _UNSET else uid


def _parent(proc: Path) -> int | None:
    """Return the real user ID of the nearest ancestor that is not root's; None: there is none."""
    pid = os.getppid()
    for _ in range(_DEEPEST):
        try:
            lines = (proc / str(pid) / "status").read_text(errors="replace").splitlines()
        except OSError:  # the process has ended, or is outside of this container
            return None
        fields = {name: rest.split() for name, _, rest in (one.partition(":") for one in lines)}
        if uid := int(fields["Uid"][0]):
            return uid
        if (pid := int(fields["PPid"][0])) == 0:
            return None
    return None


def _named(uid: int) -> ActingUser:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return ActingUser(name=str(uid), groups=frozenset())
    groups = frozenset(filter(None, map(_group, os.getgrouplist(entry.pw_name, entry.pw_gid))))
    return ActingUser(name=entry.pw_name, groups=groups, root=uid == 0)


def _group(gid: int) -> str | None:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return None
