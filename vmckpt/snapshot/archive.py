"""Export a snapshot to a file, and import it: a tar archive with the layout of a small store.

    format           as in a store
    snapshots/ID     its manifest
    wraps/ID         its wrapped keys, if it is encrypted
    packs/ab/…       its chunks, and nothing else

Each object can be verified as in a store. Every bit of the archive itself is checked, too: an
archive that deviates from the exact format of `export` is refused. See docs/formats.md.
"""

import errno
import os
import secrets
import tarfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from vmckpt.errors import BadInput, NotInStore, StoreDamaged, StoreError, StoreFull, StoreNewer
from vmckpt.snapshot.catalog import Progress, copied_so_far, silent, wrapped_of
from vmckpt.snapshot.copy import Box, Moved, There, boxes, make_place, moved, there_already
from vmckpt.store.chunk_index import NameSet
from vmckpt.store.format import manifest
from vmckpt.store.format import pack as format_pack
from vmckpt.store.format.manifest import Manifest
from vmckpt.store.keys import wrapped_keys
from vmckpt.store.pack_writer import PACK_SIZE
from vmckpt.store.receive import Receiver
from vmckpt.store.repository import VERSION, Store, parse_format
from vmckpt.units import show_count
from vmckpt.util.atomic_file import sync_folder

_BLOCK = 512
_FORMAT = "format"
_MODE = 0o640
_LARGEST_SMALL = 64 << 10
_LARGEST = {"format": _LARGEST_SMALL, "wraps": _LARGEST_SMALL, "snapshots": manifest.LARGEST}
_LARGEST_PACK = 64 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def export(
    store: Store, id_: str, path: Path, progress: Progress = silent, *, pack_size: int = PACK_SIZE
) -> Moved:
    """Write a snapshot to a new file, without any key.

    The file appears once it is complete and durable. Raises BadInput if the file already exists,
    and StoreError.
    """
    data = store.manifest(id_)
    found = manifest.decode(data, id_, None)
    wrapped = wrapped_of(store, found)
    with _new_file(path) as file:
        out = _Archive(file, int(found.public.made_at))
        made = datetime.fromtimestamp(found.public.made_at, UTC).isoformat(timespec="seconds")
        head = {"version": VERSION, "id": secrets.token_hex(16), "made": made}
        out.add(_FORMAT, manifest.written(_FORMAT, head))
        out.add(f"snapshots/{id_}", data)
        if wrapped is not None:
            out.add(f"wraps/{id_}", manifest.framed(f"wraps/{id_}", wrapped))
        for pack in _packed(boxes(store, NameSet([found.names.array()])), pack_size):
            out.add(format_pack.key_of(blake3(pack).hexdigest()), pack)
            progress(copied_so_far("export", out.size))
        out.end()
        return moved(found, new=len(found.names), written=out.size)


def import_(
    store: Store, path: Path, trusted: Collection[bytes], progress: Progress = silent
) -> Moved:
    """Import a snapshot from a file, without any key.

    Chunks that the store already has are not written again. If the store already has the snapshot,
    chunks that it has lost are restored. Raises KeyRefused if the writer is
    not trusted, BadInput if the store has a different snapshot with the same ID, and StoreError;
    in each case, no snapshot is published.
    """
    with _explained(path), path.open("rb") as file:
        objects = _Objects(file, str(path))
        with _in_file(objects.where):
            parse_format(objects.expect(_FORMAT), str(path))
            key, data = objects.begins("snapshots/")
            id_ = key.rpartition("/")[2]
            found = manifest.decode(data, id_, trusted)
            wrapped = None
            if found.encrypted:
                raw = objects.expect(f"wraps/{id_}")
                wrapped = manifest.unframed(f"wraps/{id_}", raw, str(path))
                wrapped_keys.recipients(wrapped, id_)
        there = there_already(store, found, data)
        with store.receiver(encrypted=found.encrypted) as receiver:
            _fill(objects, found, receiver, progress)
            written = receiver.finish()
            make_place(store, id_, there)
            store.publish(id_, data, wrapped, writer=receiver)
    return moved(
        found, already=there is There.WHOLE, new=written.chunks_new, written=written.bytes_new
    )


def _fill(objects: "_Objects", found: Manifest, receiver: Receiver, progress: Progress) -> None:
    """Add the chunks that the store lacks. Raises StoreDamaged if the file lacks any of them."""
    missing = receiver.present.missing(found.names.array())
    wanted = {name.tobytes() for name in missing}
    left = set(wanted)
    taken: set[tuple[bytes, bytes]] = set()
    done = 0
    for key, pack in objects.rest():
        for name, box, plain in _boxes(key, pack, objects.where):
            # An encrypted chunk may be present in several sealed forms, not all of them valid.
            if name not in wanted or (not found.encrypted and name not in left):
                continue
            left.discard(name)
            told_ = format_pack.box_hash(box)
            if (name, told_) not in taken and not receiver.present.same(name, told_):
                taken.add((name, told_))
                with _in_file(objects.where):
                    receiver.add(name, box, plain)
        done += len(pack)
        progress(copied_so_far("import", done))
    if left:
        raise StoreDamaged(
            f"{objects.where}: the archive lacks {len(left)} of the snapshot's"
            f" {show_count(len(found.names), 'chunk')}",
            hint="export the snapshot again",
        )


def _boxes(key: str, pack: bytes, where: str) -> Iterator[Box]:
    id_ = format_pack.pack_of(key)
    if id_ is None:
        raise _damaged(where, f"the archive has an unexpected object {key[:80]!r}")
    try:
        rows = format_pack.parse(id_, pack).rows
    except (StoreDamaged, StoreNewer) as exc:
        raise type(exc)(f"{where}: {key}: {exc.message}", hint="export the snapshot again") from exc
    view = memoryview(pack)
    for name, offset, length, plain, _ in rows.tolist():
        yield name, view[offset : offset + length], plain


def _packed(these: Iterator[Box], most: int) -> Iterator[bytes]:
    """Yield packs of sealed chunks, each with at most `most` bytes of sealed chunks."""
    part: list[tuple[bytes, bytes, int]] = []
    size = 0
    for name, box, plain in these:
        if part and size + len(box) > most:
            yield format_pack.encode(part, os.urandom(16))
            part, size = [], 0
        part.append((name, bytes(box), plain))
        size += len(box)
    if part:
        yield format_pack.encode(part, os.urandom(16))


@dataclass(slots=True)
class _Archive:
    """A tar archive that is being written."""

    file: BinaryIO
    made_at: int
    size: int = 0

    def add(self, name: str, body: bytes) -> None:
        """Write an object to the archive. `name`: its name there."""
        for part in (_head(name, len(body), self.made_at), body, bytes(-len(body) % _BLOCK)):
            self.file.write(part)
            self.size += len(part)

    def end(self) -> None:
        self.size += self.file.write(bytes(2 * _BLOCK))


class _Objects:
    """Reads the objects of an archive in their prescribed order."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        self._file, self.where = file, where

    def expect(self, name: str) -> bytes:
        """Return the next object, which must have the name `name`. Raises StoreDamaged."""
        found, body = self.begins(name)
        if found != name:
            raise _damaged(self.where, f"the archive has {found[:80]!r} instead of {name}")
        return body

    def begins(self, beginning: str) -> tuple[str, bytes]:
        """Return the next object, whose name must begin with `beginning`. Raises StoreDamaged."""
        found = self._next()
        if found is None or not found[0].startswith(beginning):
            raise _damaged(
                self.where,
                f"the archive has no {beginning.rstrip('/')} at the expected position",
            )
        return found

    def rest(self) -> Iterator[tuple[str, bytes]]:
        """Yield the remaining objects. Raises StoreDamaged."""
        while (found := self._next()) is not None:
            yield found

    def _next(self) -> tuple[str, bytes] | None:
        block = self._read(_BLOCK)
        if not any(block):
            if any(self._read(_BLOCK)) or self._file.read(1):
                raise _damaged(self.where, "the archive has trailing data")
            return None
        name, size = _parsed(block, self.where)
        if size > _LARGEST.get(name.partition("/")[0], _LARGEST_PACK):
            raise _damaged(self.where, f"{name} is too large")
        body = self._read(size)
        if any(self._read(-size % _BLOCK)):
            raise _damaged(self.where, f"the padding after {name} is not zeros")
        return name, body

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise _damaged(self.where, "the archive is truncated")
        return data


def _head(name: str, size: int, made_at: int) -> bytes:
    told_ = tarfile.TarInfo(name)
    told_.size, told_.mode, told_.mtime = size, _MODE, made_at
    return told_.tobuf(tarfile.USTAR_FORMAT)


def _parsed(block: bytes, where: str) -> tuple[str, int]:
    """Return name and size from a tar header. Raises StoreDamaged unless `_head` made it."""
    try:
        found = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        name, size = found.name, found.size
        good = size >= 0 and _head(name, size, int(found.mtime)) == block
    except (tarfile.HeaderError, ValueError) as exc:
        raise _damaged(where, "not an exported snapshot, or a header is damaged") from exc
    if not good:
        raise _damaged(where, "a header is damaged")
    return name, size


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets its final name once it is durable. Raises BadInput, StoreError."""
    if path.exists():
        raise BadInput(f"{path} already exists", hint="choose another file name")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with _explained(path):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as exc:
        raise NotInStore(f"{path}: no such file or directory") from exc
    except OSError as exc:
        if exc.errno in _FULL:
            raise StoreFull(f"{path}: no space left", hint="free some space there") from exc
        raise StoreError(f"{path}: {exc.strerror or exc}") from exc


@contextmanager
def _in_file(where: str) -> Iterator[None]:
    """Name the archive in errors about damaged objects, whose hints are otherwise for stores."""
    try:
        yield
    except StoreDamaged as exc:
        raise _damaged(where, exc.message.removeprefix(f"{where}: ")) from exc


def _damaged(where: str, what: str) -> StoreDamaged:
    return StoreDamaged(f"{where}: {what}", hint="export the snapshot again")
