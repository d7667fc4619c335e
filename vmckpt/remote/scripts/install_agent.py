"""Install the agent's bundle, which is read from stdin. This script is sent to a host as text.

    python3 -c TEXT DIRECTORY NAME DIGEST SIZE PROGRAM

DIRECTORY/NAME appears complete or not at all: the bundle is unpacked to a temporary directory,
compared with DIGEST, tested by running PROGRAM, synced to disk, and then renamed. Other versions in
DIRECTORY are removed if no process uses them and they were not requested recently. A failure is
reported by one line on stderr and exit code 1. Only the standard library is used.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

USED = "used"
"""File that is touched whenever a controller looks for the version."""
_UNUSED = 3600.0
"""Seconds after which a controller that looked for a version must have started the agent."""
_NEW, _OLD = ".new-", ".old-"
_TRIAL = 300.0
_PIECE = 1 << 20
_SYNCERS = 16  # parallel fsyncs share one commit of the file system's journal
_OURS = {"PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}


class InstallRefused(Exception):
    """The agent was not installed; the text is the reason."""


def install(folder: Path, name: str, digest: str, size: int, program: str) -> None:
    """Install the version `name` in a directory of this name inside `folder`.

    `digest`: of the bundle; `size`: free space that the installation needs, in bytes; `program`:
    see `trial`. Raises InstallRefused, OSError. After any exception, the version is not installed,
    or it is complete and usable.
    """
    make(folder)
    room = os.statvfs(folder)
    if room.f_bavail * room.f_frsize < size:
        raise InstallRefused(f"{folder}: not enough space for {size >> 20} MiB")
    with draft(folder) as new:
        site = new / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        found = unpack(new, site)
        if found != digest:
            raise InstallRefused("the bundle did not arrive intact")
        furnish(new)
        trial(new, program)
        sync(new)
        put(new, folder / name, program)
    # If this fails, the version is kept: it is complete, and another controller may already use it.
    durable(folder)
    with suppress(OSError):
        remove_old(folder, name)


def make(folder: Path) -> None:
    """Create the directory for all versions; only this user may write to it.

    Raises InstallRefused and OSError.
    """
    there = folder
    while not os.path.lexists(there):
        there = there.parent
    verify(there, folder)  # before anything is created in it
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink():
        raise InstallRefused(f"{folder}: not a directory")
    verify(folder, folder)


def verify(there: Path, folder: Path) -> None:
    """Raise InstallRefused if other users can write to `there` or a directory above it.

    Raises OSError.
    """
    for one in [there, *there.parents, *there.resolve().parents]:
        seen = one.lstat()
        if seen.st_uid not in (0, os.geteuid()) or others_write(seen, parent=one != folder):
            raise InstallRefused(f"{one}: other users can write to it")


def others_write(seen: os.stat_result, *, parent: bool) -> bool:
    """Return whether other users can create or replace files in a directory.

    `parent`: whether it is a parent of the directory for all versions; root's group may write to
    parents.
    """
    if stat.S_ISLNK(seen.st_mode) or (parent and seen.st_mode & stat.S_ISVTX):
        return False
    return bool(seen.st_mode & 0o002 or (seen.st_mode & 0o020 and (seen.st_gid or not parent)))


@contextmanager
def held(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Lock a directory during the block; the lock ends with this process.

    `how`: the operation for flock(2). Raises OSError.
    """
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(file, how)
        yield
    finally:
        os.close(file)


@contextmanager
def draft(folder: Path) -> Iterator[Path]:
    """Create a locked temporary directory, and delete it at the end of the block.

    Also deletes temporary directories of killed installers, which are no longer locked. Raises
    OSError.
    """
    with held(folder):
        for one in [*folder.glob(_NEW + "*"), *folder.glob(_OLD + "*")]:
            with suppress(OSError), held(one, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(one, ignore_errors=True)
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=folder))
        holding = held(new)
        holding.__enter__()
    try:
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)
        holding.__exit__(None, None, None)


def unpack(new: Path, site: Path) -> str:
    """Unpack stdin to `new`, and its directory "site" to `site`. Returns the digest of all files.

    See `bundle` for the format. Raises InstallRefused, EOFError, OSError; tarfile.TarError if the
    archive is damaged.
    """
    digests = {}
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|gz") as tar:
        for member in tar:
            parts = member.name.split("/")
            if not member.isreg() or "" in parts or ".." in parts:
                raise InstallRefused(f"the bundle has an invalid member: {member.name!a}")
            at = site.joinpath(*parts[1:]) if parts[0] == "site" else new.joinpath(*parts)
            at.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            digests[member.name] = written(source, at)
            at.chmod(0o755 if member.mode & 0o100 else 0o644)
            os.utime(at, (member.mtime, member.mtime))
    while sys.stdin.buffer.read(_PIECE):  # padding after the end of the archive
        pass
    whole = hashlib.sha256()
    for one in sorted(digests):
        whole.update(f"{one}\0{digests[one]}\n".encode())
    return whole.hexdigest()


def written(source: IO[bytes], at: Path) -> str:
    """Copy `source` to a new file. Returns the file's SHA-256 digest."""
    digest = hashlib.sha256()
    with at.open("xb") as file:
        while piece := source.read(_PIECE):
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def furnish(new: Path) -> None:
    """Make the directory a virtual environment of this Python, without the system's packages.

    Raises OSError.
    """
    base = Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()
    (new / "bin").mkdir(exist_ok=True)
    (new / "bin/python3").symlink_to(base)
    (new / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    (new / USED).touch()


def trial(at: Path, program: str) -> None:
    """Check that the agent starts; the start also compiles bytecode. Raises InstallRefused.

    `at`: the directory of the installation; `program`: Python code that starts the agent.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _OURS}
    try:
        done = subprocess.run(
            [str(at / "bin/python3"), "-c", program], stdin=subprocess.DEVNULL, cwd="/",
            env=dict(environ, PYTHONSAFEPATH="1"), stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, timeout=_TRIAL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise InstallRefused(f"the agent did not start within {_TRIAL:g} s") from None
    except OSError as exc:
        raise InstallRefused(f"the agent does not start: {exc}") from None
    if done.returncode != 0:
        told = done.stderr.decode(errors="replace").strip().splitlines() or ["no error message"]
        raise InstallRefused(f"the agent does not start: {told[-1]}")


def sync(new: Path) -> None:
    """Sync all files and directories to disk. Raises OSError."""
    with ThreadPoolExecutor(_SYNCERS) as pool:
        below = [Path(root, name) for root, _, names in os.walk(new) for name in names]
        list(pool.map(durable, [one for one in below if not one.is_symlink()]))
        list(pool.map(durable, [Path(root) for root, _, _ in os.walk(new)]))


def durable(path: Path) -> None:
    """Sync a file or directory to disk. Raises OSError."""
    file = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def put(new: Path, at: Path, program: str) -> None:
    """Rename `new` to `at`, its final name, unless a working installation is already there.

    `program`: see `trial`. Raises InstallRefused, OSError.
    """
    for _ in range(2):
        try:
            new.rename(at)
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
        try:
            trial(at, program)
        except InstallRefused:  # for example because the host's Python has changed
            discard(at)
        else:
            return
    raise InstallRefused(f"{at}: other installations keep replacing it")


def remove_old(folder: Path, kept: str) -> None:
    """Remove other versions that are not in use and not recently requested. Raises OSError.

    `folder`: has one directory for each version; `kept`: name of the directory to keep.
    """
    old = [one for one in folder.iterdir() if one.name[0] != "." and one.name != kept]
    for one in old:
        try:
            asked = (one / USED).stat().st_mtime
        except OSError:
            asked = one.stat().st_mtime
        if asked < time.time() - _UNUSED and not is_used(one.name):
            discard(one)


def discard(version: Path) -> None:
    """Remove a version; for other processes, it disappears in one step. Raises OSError."""
    gone = version.parent / f"{_OLD}{os.getpid()}-{version.name}"
    version.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def is_used(name: str) -> bool:
    """Return whether a process was started from this version or has one of its files mapped.

    Returns True if this cannot be determined.
    """
    part = f"/{name}/".encode()
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            for about in ("cmdline", "maps"):
                try:
                    if part in (process / about).read_bytes():
                        return True
                # A process of another user cannot run from a directory that only this user can
                # enter.
                except (FileNotFoundError, ProcessLookupError, PermissionError):
                    pass
                except OSError:
                    return True
    return False


def main() -> None:
    """Install the bundle. Exits with code 0 if the bundle is installed."""
    folder, name, digest, size, program = sys.argv[1:]
    try:
        install(Path(folder), name, digest, int(size), program)
    except (tarfile.TarError, EOFError) as exc:
        sys.exit(f"the bundle did not arrive intact: {exc}")
    except (InstallRefused, OSError) as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main()
