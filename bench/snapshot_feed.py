"""Store the files of a guest as a snapshot, and read them back, as an agent does.

    python -m bench.snapshot_feed init HOME             HOME: store, parent state, keys
    python -m bench.snapshot_feed put HOME INPUT
    python -m bench.snapshot_feed get HOME OUTPUT       the last snapshot
    python -m bench.snapshot_feed put-made HOME MIB KIND    memory generated while it is read
    python -m bench.snapshot_feed get-made HOME         read the last snapshot and drop the data

In INPUT, `disk*` are disks, and all other files are memory. Snapshots are encrypted and signed,
with manifest, wrapped key and parent state; all data is on the disk on return. Prints the results,
including the peak memory, as JSON.
"""

import json
import os
import resource
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from vmckpt.store import parent_state
from vmckpt.store.assemble import Assembly
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.chunk_reader import Reader
from vmckpt.store.format import manifest
from vmckpt.store.format.chunk_map import UNIT, Extent, Kind, Region, What
from vmckpt.store.format.manifest import Keys
from vmckpt.store.format.metadata import Contents, PrivateFacts, Public, new_id
from vmckpt.store.format.private_part import Private, RegionMap, compacted
from vmckpt.store.ingest import Ingest, Table
from vmckpt.store.keys import identity as keys_identity
from vmckpt.store.keys import wrapped_keys
from vmckpt.store.keys.key_files import KeyKind, key_text
from vmckpt.store.keys.keyring import Keyring
from vmckpt.store.pack_writer import Written
from vmckpt.store.parent_state import Draft
from vmckpt.store.repository import Store
from vmckpt.units import Bytes

KINDS = ("mixed", "random", "zeros", "sparse")
"""Kinds of generated memory. mixed: a third each of random bytes, small numbers and zeros; random
and zeros: only these; sparse: one page of small numbers in 64 pages, and holes."""
_FACTS = PrivateFacts(domain_xml="<domain/>", cpu_xml=None, boot_files=(), ram=(), disks=())
_PAGE = UNIT[Kind.RAM]


class FileRegion:
    """A region backed by a file, whose holes are not read. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.name, self.size = path.name, Bytes(path.stat().st_size)
        self.kind = Kind.DISK if path.name.startswith("disk") else Kind.RAM
        self._unit = UNIT[self.kind]
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> "FileRegion":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def extents(self) -> Iterator[Extent]:
        at = 0
        while at < self.size:
            try:
                first = os.lseek(self._file, at, os.SEEK_DATA)
            except OSError:  # only a hole until the end of the file
                return
            end = os.lseek(self._file, first, os.SEEK_HOLE)
            first, last = max(at, first // self._unit * self._unit), -(-end // self._unit)
            yield Extent(first // self._unit, last - first // self._unit, What.DATA)
            at = last * self._unit

    def read(self, start: int, count: int) -> memoryview:
        data = os.pread(self._file, count * self._unit, start * self._unit)
        return memoryview(data.ljust(count * self._unit, b"\0"))


class MadeRegion:
    """A region of generated memory of any size. All nonzero pages are different."""

    kind = Kind.RAM

    def __init__(self, size: int, what: str) -> None:
        self.name, self.size, self._what = "pc.ram", Bytes(size), what
        rng = np.random.default_rng(5)
        self._random = rng.integers(0, 1 << 63, (64, _PAGE // 8), dtype=np.uint64)
        # Words with small numbers: most bits are 0, as in the tables of a guest.
        self._text = rng.integers(0, 1 << 20, (64, _PAGE // 8), dtype=np.uint64)

    def extents(self) -> Iterator[Extent]:
        if self._what != "sparse":
            yield Extent(0, self.size // _PAGE, What.DATA)
            return
        for start in range(0, self.size // _PAGE, 64):
            yield Extent(start, 1, What.DATA)
            yield Extent(start + 1, 63, What.ZEROS)

    def read(self, start: int, count: int) -> memoryview:
        numbers = np.arange(start, start + count, dtype=np.uint64)
        turns = np.zeros(count, dtype=np.int8) if self._what == "random" else (numbers // 64) % 3
        if self._what in ("zeros", "sparse"):
            turns = np.full(count, 2 if self._what == "zeros" else 1)
        pages = np.zeros((count, _PAGE // 8), dtype=np.uint64)
        # XOR with a number for each page: bytes stay random, and no two pages are equal.
        mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for turn, source in ((0, self._random), (1, self._text)):
            these = np.flatnonzero(turns == turn)
            pages[these] = source[numbers[these] % np.uint64(64)]
            pages[these] ^= mixed[these, None] if turn == 0 else numbers[these, None]
        return pages.data.cast("B")


def init(home: Path) -> None:
    """Create a store and keys."""
    home.mkdir(mode=0o700)
    Store.create(LocalFolder(home / "store"))
    public = keys_identity.create(home / "identity")
    ring = Keyring(home / "keys")
    ring.add_admin("bench", key_text(KeyKind.ADMIN, public))


def put(home: Path, regions: Sequence[Region]) -> dict[str, Any]:
    """Create a snapshot. Returns its sizes in bytes."""
    ring = Keyring(home / "keys")
    keys = Keys(ring.signing(), ring.salt(), secrets.token_bytes(32))
    assert keys.data_key is not None
    past = parent_state.load(home / "line")
    store = Store.open(LocalFolder(home / "store"), cache=home / "cache")
    with store.writer(keys.sealing()) as writer, Draft(home / "line") as draft:
        table = Table(past.chunks if past is not None else ())
        work = Ingest(writer, table, stop=threading.Event())
        maps = []
        for one in regions:
            prints = draft.prints(one.name, one.kind, one.size)
            before = past.regions.get(one.name) if past is not None else None
            map_ = work.region(one, before, prints, draft.map(one.kind, one.size))
            maps.append(RegionMap(name=one.name, kind=one.kind, size=one.size, map=map_))
        written = writer.finish()
        private = compacted(
            Private(facts=_FACTS, chunks=table.digests(), regions=tuple(maps), files={})
        )
        public = _public(private, written, None if past is None else past.snapshot)
        wrapped = wrapped_keys.wrap(keys.data_key, public.id, [one.key for one in ring.admins()])
        encoded = manifest.encode(public, private, keys)
        store.publish(public.id, encoded, wrapped, writer=writer)
        draft.keep(public.id, list(private.chunks), {one.name: one.map for one in maps}, {})
    (home / "last").write_text(public.id)
    return {
        "read": work.counts.read,
        "same": work.counts.same,
        "new": written.bytes_new,
        "manifest": len(encoded),
    }


def _public(private: Private, written: Written, parent: str | None) -> Public:
    sizes = {kind: sum(one.size for one in private.regions if one.kind is kind) for kind in Kind}
    return Public(
        id=new_id(secrets.token_bytes(10)), name="bench", guest="web1",
        guest_uuid="00000000-0000-4000-8000-000000000000", contents=Contents.MEMORY,
        made_at=time.time(), by="bench", host="bench", parent=parent, group=None,
        memory=sizes[Kind.RAM], disks=sizes[Kind.DISK], new=written.bytes_new, qemu="", machine="",
        accelerator="", arch="", epoch=0, owner="", tags={},
    )  # fmt: skip


def get(home: Path, output: Path | None) -> dict[str, Any]:
    """Read the last snapshot. `output`: directory for its files; None: drop the data."""
    snapshot = (home / "last").read_text()
    store = Store.open(LocalFolder(home / "store"), cache=home / "cache")
    identity = keys_identity.load(home / "identity")
    trusted = Keyring(home / "keys").trusted()
    found = manifest.decode(store.manifest(snapshot), snapshot, trusted)
    data_key = wrapped_keys.unwrap(store.wraps(snapshot) or b"", snapshot, identity)
    private, sealing = found.opened(data_key)
    total = 0
    with store.reader(sealing) as reader:
        for one in private.regions:
            total += one.size
            _get(one, private, reader, None if output is None else output / one.name)
    return {"read": total}


def _get(region: RegionMap, private: Private, reader: Reader, path: Path | None) -> None:
    assembly = Assembly(region.kind, region.size, region.map, private.chunks, reader)
    file = -1 if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if file >= 0:
            os.ftruncate(file, region.size)
        for piece in assembly.pieces():
            if piece.data is not None and file >= 0:
                _write(file, piece.data, piece.start * UNIT[region.kind])
        if file >= 0:
            os.fsync(file)
    finally:
        if file >= 0:
            os.close(file)


def _write(file: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(file, data, at)
        data, at = data[done:], at + done


def main() -> None:
    """Run the command from the command line, and print the results as JSON."""
    what, home, *words = sys.argv[1:]
    folder, told = Path(home), {}
    began = time.perf_counter()
    if what == "init":
        init(folder)
    elif what == "put":
        with ExitStack() as stack:
            files = sorted(Path(words[0]).iterdir())
            told = put(folder, [stack.enter_context(FileRegion(one)) for one in files])
    elif what == "put-made":
        told = put(folder, [MadeRegion(int(words[0]) << 20, words[1])])
    else:
        told = get(folder, Path(words[0]) if what == "get" else None)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({**told, "inside": time.perf_counter() - began, "peak": peak}))


if __name__ == "__main__":
    main()
