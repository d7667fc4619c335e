"""A store in a folder: objects are files that appear by rename, after they are on the disk."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vmckpt.errors import NotInStore, StoreError, StoreFull
from vmckpt.store.backend import Data, Stored, checked, is_key
from vmckpt.store.faults import fault
from vmckpt.units import Seconds
from vmckpt.wholefile import sync_folder

_TEMPORARY = "tmp"
_FULL = {errno.ENOSPC: "no room left", errno.EDQUOT: "the quota is used up"}
_REFUSED = {errno.EROFS: "it is read-only", errno.EACCES: "no leave", errno.EPERM: "no leave"}
# What file systems without hard links say.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalFolder:
    """A folder, on a disk of this host or on one that is mounted here."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder

    def put(self, key: str, data: Data, *, replace: bool = False) -> bool:
        final = self._path(key)
        temporary = self._folder / _TEMPORARY / secrets.token_hex(12)
        with self._explained(key):
            self._make_folder(temporary.parent)
            self._make_folder(final.parent)
            try:
                self._write(temporary, data)
                done = _publish(temporary, final, replace=replace)
                fault("local: published")
                if done:
                    sync_folder(final.parent)
                return done
            finally:
                temporary.unlink(missing_ok=True)

    def prove_locks(self) -> None:
        """Nothing to try: the kernel makes no second file of a name."""

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        with self._explained(key):
            file = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
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
        path = self._path(prefix)
        with self._explained(prefix):
            status = path.stat() if path.exists() else None
        if status is not None:
            yield self._stored(prefix, status)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with contextlib.suppress(NotInStore), self._explained(key):
            path.unlink()
            sync_folder(path.parent)
        fault("local: deleted")

    def leftovers(self) -> Iterator[Stored]:
        yield from self._below(_TEMPORARY)

    def clear(self, leftover: str) -> None:
        with contextlib.suppress(NotInStore), self._explained(leftover):
            self._path(leftover).unlink()

    @staticmethod
    def _write(temporary: Path, data: Data) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(temporary, flags, 0o640)
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

    def _make_folder(self, folder: Path) -> None:
        """Make a folder inside the store; that it is there is durable too."""
        if folder.is_dir():
            return
        if folder != self._folder:
            self._make_folder(folder.parent)
        elif not folder.parent.is_dir():
            raise StoreError(
                f"{self.where}: there is no folder {folder.parent}", mend="make it, or mount it"
            )
        folder.mkdir(mode=0o750, exist_ok=True)
        sync_folder(folder.parent)

    def _below(self, folder: str) -> Iterator[Stored]:
        """All files below a folder, which may be gone or change meanwhile."""
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
        path = self._path(folder)
        with contextlib.suppress(NotInStore), self._explained(folder), os.scandir(path) as entries:
            for entry in entries:
                # What is no key is of somebody else: NFS (.nfs…), rsync, a desktop.
                if not is_key(entry.name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((f"{folder}/{entry.name}", status))
        return found

    def _path(self, key: str) -> Path:
        return self._folder / checked(key)

    @staticmethod
    def _stored(key: str, status: os.stat_result) -> Stored:
        return Stored(key, status.st_size, Seconds(status.st_mtime))

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        """Say what the system said, in the store's words."""
        try:
            yield
        except FileNotFoundError as exc:
            if not self._folder.is_dir():
                raise StoreError(
                    f"{self.where}: there is no such folder",
                    mend="mount it, or make a store there: vmckpt snapshot init",
                ) from exc
            raise NotInStore(f"{self.where} has no {key}") from exc
        except OSError as exc:
            code = exc.errno or 0
            if code in _FULL:
                raise StoreFull(
                    f"{self.where}: {_FULL[code]} to write {key}",
                    mend="make room there, or prune and gc",
                ) from exc
            if code in _REFUSED:
                raise StoreError(
                    f"{self.where}: {key}: {_REFUSED[code]}",
                    mend="see its owner, mode and mount options",
                ) from exc
            raise StoreError(f"{self.where}: {key}: {os.strerror(code)}") from exc


def _publish(temporary: Path, final: Path, *, replace: bool) -> bool:
    """Give a file its name; False if there is one of that name, which stays."""
    if replace:
        temporary.rename(final)
        return True
    try:
        os.link(temporary, final)
    except FileExistsError:
        return False
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        # The names that matter are random: two writers do not choose the same one.
        if final.exists():
            return False
        temporary.rename(final)
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
