"""A store in a directory. Objects are files that get their name only after they are synced to disk.

The directory may belong to another user. Therefore symbolic links in the directory are not followed
and FIFOs are not read.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vmckpt.errors import NotInStore, StoreError, StoreFull
from vmckpt.store.backend.base import Data, Stored, checked, full_hint, is_key
from vmckpt.store.fault_injection import fault
from vmckpt.units import Seconds
from vmckpt.util.atomic_file import sync_folder
from vmckpt.util.host_files import Folder

_TEMPORARY = "tmp"
_FULL = {errno.ENOSPC: "no space left", errno.EDQUOT: "quota exceeded"}
_REFUSED = {
    errno.EROFS: "read-only file system",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
}
# Errors of link() on file systems that have no hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalFolder:
    """A store's directory on a local or mounted file system."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder

    def put(self, key: str, data: Data, *, replace: bool = False) -> bool:
        inside, name = _split(key)
        temporary = secrets.token_hex(12)
        with (
            self._explained(key),
            self._made(_TEMPORARY) as drafts,
            self._made(inside) as folder,
        ):
            try:
                self._write(drafts, temporary, data)
                done = _publish(drafts, temporary, folder, name, replace=replace)
                fault("local: published")
                if done:
                    folder.sync()
                return done
            finally:
                drafts.remove(temporary)

    def prove_locks(self) -> None:
        """Do nothing: on file systems with hard links, link() never replaces an existing file."""

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        inside, name = _split(key)
        with self._explained(key), self._opened(inside) as folder:
            file = folder.open(name)
            try:
                size = os.fstat(file).st_size
                end = size if length is None else min(size, offset + length)
                return _read(file, offset, end - offset)
            finally:
                os.close(file)

    def keys(self, prefix: str) -> Iterator[Stored]:
        if prefix.endswith("/"):
            yield from self._below(prefix.rstrip("/"))
            return
        inside, name = _split(prefix)
        status = None
        with (
            contextlib.suppress(NotInStore),
            self._explained(prefix),
            self._opened(inside) as folder,
        ):
            status = folder.look(name)
        if status is not None:
            yield self._stored(prefix, status)

    def delete(self, key: str) -> None:
        inside, name = _split(key)
        with (
            contextlib.suppress(NotInStore),
            self._explained(key),
            self._opened(inside) as folder,
        ):
            folder.remove(name)
            folder.sync()
        fault("local: deleted")

    def leftovers(self) -> Iterator[Stored]:
        yield from self._below(_TEMPORARY)

    def clear(self, leftover: str) -> None:
        inside, name = _split(leftover)
        with (
            contextlib.suppress(NotInStore),
            self._explained(leftover),
            self._opened(inside) as folder,
        ):
            folder.remove(name)

    @staticmethod
    def _write(folder: Folder, name: str, data: Data) -> None:
        file = folder.create(name, 0o640)
        try:
            fault("local: temporary made")
            left = memoryview(data).cast("B")
            while left:
                left = left[os.write(file, left) :]
            fault("local: written")
            os.fsync(file)
            fault("local: synced")
        finally:
            os.close(file)

    def _opened(self, inside: str) -> Folder:
        """Open a directory inside the store. Raises OSError."""
        return Folder.below(self._folder, inside)

    def _made(self, inside: str) -> Folder:
        """Open a directory inside the store. Creates a missing directory durably.

        Raises OSError, and StoreError if the store's parent directory does not exist.
        """
        with contextlib.suppress(FileNotFoundError):
            return self._opened(inside)
        if not inside:
            self._make_root()
            return self._opened(inside)
        above, _, name = inside.rpartition("/")
        with self._made(above) as folder:
            with contextlib.suppress(FileExistsError):
                folder.make(name, 0o750).close()
            folder.sync()
        return self._opened(inside)

    def _make_root(self) -> None:
        if not self._folder.parent.is_dir():
            raise StoreError(
                f"{self.where}: directory {self._folder.parent} does not exist",
                hint="create or mount the directory",
            )
        self._folder.mkdir(mode=0o750, exist_ok=True)
        sync_folder(self._folder.parent)

    def _below(self, folder: str) -> Iterator[Stored]:
        """List all files below a directory, which may be missing or change at the same time."""
        folders = []
        for name, status in self._listed(folder):
            if stat.S_ISDIR(status.st_mode):
                folders.append(name)
            elif stat.S_ISREG(status.st_mode):
                yield self._stored(name, status)
        for inner in folders:
            yield from self._below(inner)

    def _listed(self, folder: str) -> list[tuple[str, os.stat_result]]:
        found = []
        with (
            contextlib.suppress(NotInStore),
            self._explained(folder),
            self._opened(checked(folder)) as opened,
            opened.listed() as listed,
            os.scandir(listed) as entries,
        ):
            for entry in entries:
                # Files whose names are not keys come from other software: NFS (.nfs…), rsync, a
                # desktop.
                if not is_key(entry.name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((f"{folder}/{entry.name}", status))
        return found

    @staticmethod
    def _stored(key: str, status: os.stat_result) -> Stored:
        return Stored(key, status.st_size, Seconds(status.st_mtime))

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        """Turn OSError into NotInStore, StoreFull or StoreError."""
        try:
            yield
        except FileNotFoundError as exc:
            if not self._folder.is_dir():
                raise StoreError(
                    f"{self.where}: no such directory",
                    hint="mount the directory, or create a store with vmckpt snapshot init",
                ) from exc
            raise NotInStore(f"{self.where} has no {key}") from exc
        except OSError as exc:
            code = exc.errno or 0
            if code in _FULL:
                raise StoreFull(
                    f"{self.where}: cannot write {key}: {_FULL[code]}",
                    hint=full_hint(key),
                ) from exc
            if code in _REFUSED:
                raise StoreError(
                    f"{self.where}: {key}: {_REFUSED[code]}",
                    hint="check the owner, the mode and the mount options",
                ) from exc
            raise StoreError(f"{self.where}: {key}: {exc.strerror or exc}") from exc


def _split(key: str) -> tuple[str, str]:
    """Split a key into a directory inside the store and a file name. Raises BadInput."""
    inside, _, name = checked(key).rpartition("/")
    return inside, name


def _publish(drafts: Folder, temporary: str, folder: Folder, name: str, *, replace: bool) -> bool:
    """Give a file its name. If the name is taken, keeps the existing file and returns False.

    With `replace`, the file replaces an existing file.
    """
    if replace:
        drafts.rename(temporary, name, folder)
        return True
    try:
        drafts.link(temporary, name, folder)
    except FileExistsError:
        return False
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        # The names for which this matters are random, so two writers do not choose the same name.
        if folder.look(name) is not None:
            return False
        drafts.rename(temporary, name, folder)
    return True


def _read(file: int, offset: int, length: int) -> bytes:
    parts = []
    while length > 0:
        part = os.pread(file, length, offset)
        if not part:
            break
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
