"""Runs on a host, sent there as text: unpacks the agent's bundle, which comes on stdin.

    python3 -c TEXT FOLDER NAME DIGEST SIZE PROGRAM

FOLDER/NAME appears whole or not at all: it is unpacked beside it, compared with DIGEST, tried by
running PROGRAM with it, made durable, and then renamed. Other versions in FOLDER are removed if
no process uses them and nobody has asked for them lately. A refusal is one line on stderr and exit
code 1. Nothing but the standard library.
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
"""Touched whenever somebody asks for the version."""
_UNUSED = 3600.0
"""Seconds: who asked longer ago has started what it was asked for."""
_NEW, _OLD = ".new-", ".old-"
_TRIAL = 300.0
_PIECE = 1 << 20
_SYNCERS = 16  # many wait for one commit of the file system's journal
_OURS = {"PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}


class InstallRefused(Exception):
    """It is not installed; the text says why."""


def install(folder: Path, name: str, digest: str, size: int, program: str) -> None:
    """Install FOLDER/NAME whole. Raises InstallRefused and OSError: then nothing of it stays."""
    make(folder)
    room = os.statvfs(folder)
    if room.f_bavail * room.f_frsize < size:
        raise InstallRefused(f"{folder}: no room for {size >> 20} MiB")
    with draft(folder) as new:
        site = new / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        found = unpack(new, site)
        if found != digest:
            raise InstallRefused("the bundle did not arrive whole")
        furnish(new)
        trial(new, program)
        sync(new)
        put(new, folder / name, program)
    durable(folder)
    with suppress(OSError):
        remove_old(folder, name)


def make(folder: Path) -> None:
    """Create the folder of all versions, only ours to write. Raises InstallRefused and OSError."""
    there = folder
    while not os.path.lexists(there):
        there = there.parent
    verify(there, folder)  # before anything is made in it
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink():
        raise InstallRefused(f"{folder}: no folder")
    verify(folder, folder)


def verify(there: Path, folder: Path) -> None:
    """Raises InstallRefused if others may change what leads to `there`, or `folder` itself."""
    for one in [there, *there.parents, *there.resolve().parents]:
        seen = one.lstat()
        if seen.st_uid not in (0, os.geteuid()) or others_write(seen, parent=one != folder):
            raise InstallRefused(f"{one}: others may write there")


def others_write(seen: os.stat_result, *, parent: bool) -> bool:
    """Whether others may put something there, or replace what is ours. Root's group may."""
    if stat.S_ISLNK(seen.st_mode) or (parent and seen.st_mode & stat.S_ISVTX):
        return False
    return bool(seen.st_mode & 0o002 or (seen.st_mode & 0o020 and (seen.st_gid or not parent)))


@contextmanager
def held(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a lock that ends with us. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(file, how)
        yield
    finally:
        os.close(file)


@contextmanager
def draft(folder: Path) -> Iterator[Path]:
    """A folder that is held while we live; those of killed installers go, and so does ours."""
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
    """Unpack stdin: what is below "site/" is for Python; the digest of all. See `bundle`."""
    digests = {}
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|gz") as tar:
        for member in tar:
            parts = member.name.split("/")
            if not member.isreg() or "" in parts or ".." in parts:
                raise InstallRefused(f"the bundle has a strange file: {member.name!a}")
            at = site.joinpath(*parts[1:]) if parts[0] == "site" else new.joinpath(*parts)
            at.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            digests[member.name] = written(source, at)
            at.chmod(0o755 if member.mode & 0o100 else 0o644)
            os.utime(at, (member.mtime, member.mtime))
    while sys.stdin.buffer.read(_PIECE):  # what follows the end of an archive
        pass
    whole = hashlib.sha256()
    for one in sorted(digests):
        whole.update(f"{one}\0{digests[one]}\n".encode())
    return whole.hexdigest()


def written(source: IO[bytes], at: Path) -> str:
    """Copy into a new file; the SHA-256 of it."""
    digest = hashlib.sha256()
    with at.open("xb") as file:
        while piece := source.read(_PIECE):
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def furnish(new: Path) -> None:
    """Make it a virtual environment of this Python: nothing else of the host is imported."""
    base = Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()
    (new / "bin").mkdir(exist_ok=True)
    (new / "bin/python3").symlink_to(base)
    (new / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    (new / USED).touch()


def trial(at: Path, program: str) -> None:
    """See that it starts; what Python compiles for that stays. Raises InstallRefused."""
    environ = {name: value for name, value in os.environ.items() if name not in _OURS}
    try:
        done = subprocess.run(
            [str(at / "bin/python3"), "-c", program], stdin=subprocess.DEVNULL, cwd="/",
            env=dict(environ, PYTHONSAFEPATH="1"), stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, timeout=_TRIAL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise InstallRefused(f"it does not start within {_TRIAL:g} s") from None
    except OSError as exc:
        raise InstallRefused(f"it does not start: {exc}") from None
    if done.returncode != 0:
        told = done.stderr.decode(errors="replace").strip().splitlines() or ["without a word"]
        raise InstallRefused(f"it does not start: {told[-1]}")


def sync(new: Path) -> None:
    """Have all of it on the disk."""
    with ThreadPoolExecutor(_SYNCERS) as pool:
        below = [Path(root, name) for root, _, names in os.walk(new) for name in names]
        list(pool.map(durable, [one for one in below if not one.is_symlink()]))
        list(pool.map(durable, [Path(root) for root, _, _ in os.walk(new)]))


def durable(path: Path) -> None:
    """Raises OSError."""
    file = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def put(new: Path, at: Path, program: str) -> None:
    """Give it its name, unless another has put one there meanwhile that starts."""
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
        except InstallRefused:  # the host's Python has changed, say
            discard(at)
        else:
            return
    raise InstallRefused(f"{at}: others put something there all the time")


def remove_old(folder: Path, kept: str) -> None:
    """Remove the versions that nobody uses; none at all if that cannot be seen."""
    old = [one for one in folder.iterdir() if one.name[0] != "." and one.name != kept]
    for one in old:
        try:
            asked = (one / USED).stat().st_mtime
        except OSError:
            asked = one.stat().st_mtime
        if asked < time.time() - _UNUSED and not is_used(one.name):
            discard(one)


def discard(version: Path) -> None:
    """Remove it at once, as others see it."""
    gone = version.parent / f"{_OLD}{os.getpid()}-{version.name}"
    version.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def is_used(name: str) -> bool:
    """Whether a process was started from that version or has a file of it in its memory."""
    part = f"/{name}/".encode()
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            for about in ("cmdline", "maps"):
                try:
                    if part in (process / about).read_bytes():
                        return True
                # What is not ours to see does not run from a folder that is ours alone.
                except (FileNotFoundError, ProcessLookupError, PermissionError):
                    pass
                except OSError:
                    return True
    return False


def main() -> None:
    """Exit code 0: it is there."""
    folder, name, digest, size, program = sys.argv[1:]
    try:
        install(Path(folder), name, digest, int(size), program)
    except (tarfile.TarError, EOFError) as exc:
        sys.exit(f"the bundle did not arrive whole: {exc}")
    except (InstallRefused, OSError) as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main()
