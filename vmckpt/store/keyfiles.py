"""Small secret files: written whole or not at all, and read by nobody but their owner."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from vmckpt.errors import KeyRefused
from vmckpt.util.atomic_file import sync_folder

# The longest that is ever written has a few hundred bytes.
_MOST = 4096


def write(path: Path, text: str, *, replace: bool = False) -> bool:
    """Write a file, durably, with mode 0600; False if it is there already. Raises KeyRefused."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        folder(path.parent)
        try:
            _fill(temporary, text)
            if replace:
                temporary.replace(path)
            else:
                # Unlike a rename, this leaves alone what another process has made meanwhile.
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    except FileExistsError:
        return False
    except OSError as exc:
        raise _refused(path, "written", exc) from exc
    return True


def _fill(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        rest = text.encode()
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path, *, secret: bool) -> str | None:
    """A file's text; None if there is none. Raises KeyRefused, also if others may read a secret."""
    try:
        # A pipe would keep us waiting for somebody to write into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise _refused(path, "read", exc) from exc
    try:
        mode = os.fstat(descriptor).st_mode
        if secret and mode & 0o077:
            raise KeyRefused(
                f"{path}: others can read this key (mode {mode & 0o777:o})",
                mend=f"chmod 600 {path}",
            )
        return os.read(descriptor, _MOST).decode("utf-8")
    except OSError as exc:
        raise _refused(path, "read", exc) from exc
    except UnicodeDecodeError as exc:
        raise KeyRefused(f"{path}: this is no key", mend="name the right file") from exc
    finally:
        os.close(descriptor)


def remove(path: Path) -> bool:
    """Remove a file, durably; False if there is none. Raises KeyRefused."""
    try:
        path.unlink()
        sync_folder(path.parent)
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise _refused(path, "removed", exc) from exc
    return True


def names(path: Path, suffix: str) -> list[str]:
    """The files of a folder that end so, without their ending, sorted. Raises KeyRefused."""
    try:
        return sorted(
            entry.name.removesuffix(suffix)
            for entry in path.iterdir()
            if entry.name.endswith(suffix) and not entry.name.startswith(".")
        )
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise _refused(path, "read", exc) from exc


def folder(path: Path) -> None:
    """Make a folder, and those above it, for its owner alone; leave one that is there as it is."""
    if path.is_dir():
        return
    folder(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        sync_folder(path.parent)


def _refused(path: Path, done: str, exc: OSError) -> KeyRefused:
    return KeyRefused(f"{path}: the key cannot be {done}: {exc.strerror or exc}")
