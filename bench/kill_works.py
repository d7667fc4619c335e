"""The operations that a campaign kills: all operations on a store, for small random guests.

Run as a program, this module forks a child for each line of JSON that it reads, so that children
need not load the libraries. It prints the child's process ID, and then its exit status.
"""

import json
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import UTC
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from vmckpt.policy.model import Keep
from vmckpt.snapshot import archive, catalog
from vmckpt.snapshot import copy as snapshot_copy
from vmckpt.snapshot import prune as snapshot_prune
from vmckpt.snapshot.verify import repair as verify_repair
from vmckpt.store import fault_injection, gc, parent_state
from vmckpt.store.assemble import Assembly
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.format import manifest
from vmckpt.store.format.chunk_map import UNIT, Extent, Kind, What
from vmckpt.store.format.manifest import Keys
from vmckpt.store.format.metadata import Contents, Part, PrivateFacts, Public, new_id
from vmckpt.store.format.private_part import Private, RegionMap, compacted
from vmckpt.store.ingest import Ingest, Table, stored
from vmckpt.store.keys import wrapped_keys
from vmckpt.store.keys.identity import public_of
from vmckpt.store.keys.keyring import OwnKey
from vmckpt.store.parent_state import Draft
from vmckpt.store.repository import Store
from vmckpt.units import Bytes, Seconds

Data = NDArray[np.uint8]
GUESTS = ("web1", "db1", "mail1")
STREAM = b"state of the devices" * 500
UNITS = {Kind.RAM: 384, Kind.DISK: 24}
PACK = 400_000
SALT = blake3(b"salt of the campaign").digest()
SIGNING = OwnKey(blake3(b"signing of the campaign").digest())
ADMIN = X25519PrivateKey.from_private_bytes(blake3(b"admin of the campaign").digest())


def content(guest: str, version: int, kind: Kind) -> Data:
    """Return a guest's memory or disk in a version. Each version changes a little."""
    shape = (UNITS[kind], UNIT[kind])
    data: Data = np.zeros(shape, dtype=np.uint8)
    for number in range(version + 1):
        rng = np.random.default_rng(int.from_bytes(f"{guest}{kind}{number}".encode(), "little"))
        count = UNITS[kind] // 2 if number == 0 else UNITS[kind] // 16
        places = rng.choice(UNITS[kind], count, replace=False)
        data[places] = rng.integers(0, 256, (count, UNIT[kind]), dtype=np.uint8)
        data[places[: count // 8]] = 0
    return data


def id_of(guest: str, version: int) -> str:
    """Return the ID of the snapshot of a guest's version."""
    return new_id(blake3(f"{guest} {version}".encode()).digest())


class _Region:
    """The memory or a disk of a guest."""

    def __init__(self, guest: str, version: int, kind: Kind) -> None:
        self.name, self.kind = {Kind.RAM: "pc.ram", Kind.DISK: "vda"}[kind], kind
        self._data = content(guest, version, kind)

    @property
    def size(self) -> Bytes:
        return Bytes(self._data.size)

    def extents(self) -> list[Extent]:
        return [Extent(0, len(self._data), What.DATA)]

    def read(self, start: int, count: int) -> memoryview:
        return memoryview(self._data[start : start + count].tobytes())


def opened(folder: Path, name: str) -> Store:
    """Open one of the two stores. Its cache outlives the clients."""
    return Store.open(LocalFolder(folder / name), cache=folder / "cache")


def create(folder: Path, guest: str, version: int) -> None:
    """Create a snapshot as agents do, from the first chunk to the parent state."""
    store, id_ = opened(folder, "near"), id_of(guest, version)
    past = parent_state.load(folder / "lines" / guest)
    data_key = os.urandom(32)
    keys = Keys(SIGNING, SALT, data_key)
    maps = []
    with (
        store.writer(keys.sealing(), pack_size=PACK) as writer,
        Draft(folder / "lines" / guest) as draft,
    ):
        table = Table(past.chunks if past is not None else ())
        work = Ingest(writer, table, stop=threading.Event())
        for kind in Kind:
            region = _Region(guest, version, kind)
            before = past.regions.get(region.name) if past is not None else None
            prints = draft.prints(region.name, kind, region.size)
            map_ = work.region(region, before, prints)
            maps.append(RegionMap(name=region.name, kind=kind, size=region.size, map=map_))
        part = Part(name="tail", size=len(STREAM), chunks=tuple(stored(writer, table, STREAM)))
        writer.finish()
        facts = PrivateFacts(
            domain_xml="<domain/>", cpu_xml=None, boot_files=(), ram=(), disks=(), stream=(part,)
        )
        private = compacted(
            Private(facts=facts, chunks=table.digests(), regions=tuple(maps), files={})
        )
        wrapped = wrapped_keys.wrap(data_key, id_, [public_of(ADMIN)])
        encoded = manifest.encode(_public(guest, version, past), private, keys)
        store.publish(id_, encoded, wrapped, writer=writer)
        draft.keep(id_, list(private.chunks), {one.name: one.map for one in private.regions}, {})


def _public(guest: str, version: int, past: parent_state.ParentState | None) -> Public:
    return Public(
        id=id_of(guest, version), name=f"{guest}-{version}", guest=guest,
        guest_uuid="0d6f7a57-be04-4dd1-80ff-c8e5fa28580b", contents=Contents.MEMORY,
        made_at=1.7e9 + 60 * version, by="bench", host="here",
        parent=None if past is None else past.snapshot, group=None, memory=0, disks=0, new=0,
        qemu="7.2.22", machine="q35", accelerator="tcg", arch="x86_64", epoch=version, owner="1",
        tags={"schedule": "nightly"} if version % 2 else {},
    )  # fmt: skip


def delete(folder: Path, name: str, id_: str) -> None:
    """Delete a snapshot as the command does."""
    opened(folder, name).delete(id_)


def prune(folder: Path, name: str, last: int) -> None:
    """Prune the snapshots of the schedule, except the newest `last`."""
    store = opened(folder, name)
    found = snapshot_prune.survey(store, {SIGNING.public})
    fates = snapshot_prune.plan(
        found, Keep(last=last), schedule="nightly", now=time.time(), zone=UTC
    )  # fmt: skip
    for _ in snapshot_prune.carry_out(store, fates):
        pass


def collect(folder: Path, name: str, life: float) -> None:
    """Run a garbage collection without a grace time."""
    gc.collect(
        opened(folder, name), catalog.references, grace=Seconds(0.0), life=Seconds(life)
    )  # fmt: skip


def copy(folder: Path, from_: str, to: str, id_: str) -> None:
    """Copy a snapshot from one store to the other."""
    snapshot_copy.copy(opened(folder, from_), opened(folder, to), id_)


def carry(folder: Path, from_: str, to: str, id_: str) -> None:
    """Export a snapshot from one store to a file, and import the file into the other store."""
    file = folder / f"{id_}-{os.getpid()}.file"
    try:
        archive.export(opened(folder, from_), id_, file, pack_size=PACK)
        archive.import_(opened(folder, to), file, {SIGNING.public})
    finally:
        file.unlink(missing_ok=True)


def repair(folder: Path, name: str, from_: str) -> None:
    """Repair a store: remove damaged objects, and fetch them from the other store."""
    verify_repair.repair(opened(folder, name), [opened(folder, from_)])


def restore(folder: Path, name: str, id_: str) -> None:
    """Read a snapshot completely, as a restore does. Raises ValueError if a byte is wrong."""
    restored(opened(folder, name), id_)


def restored(store: Store, id_: str) -> None:
    """Read a snapshot of an open store. Raises ValueError if a byte differs from the guest's."""
    looked = catalog.inspect(store, id_, {SIGNING.public})
    private, sealing = catalog.opened(store, looked, lambda: ADMIN, {SIGNING.public})
    guest, _, version = looked.public.name.rpartition("-")
    with store.reader(sealing) as reader:
        for region in private.regions:
            size = int(region.size)
            assembly = Assembly(region.kind, size, region.map, private.chunks, reader)
            told = b"".join(
                bytes(one.count * UNIT[region.kind]) if one.data is None else bytes(one.data)
                for one in assembly.pieces()
            )
            if told != content(guest, int(version), region.kind).tobytes():
                raise ValueError(f"{id_}: {region.name} differs from that of {guest}")
        [part] = private.facts.stream
        if b"".join(reader.read(private.chunks[one]) for one in part.chunks) != STREAM:
            raise ValueError(f"{id_}: the stream differs from the captured stream")


def damage(folder: Path, name: str, seed: int) -> None:
    """Flip a bit in the sealed chunks of a pack, as a bad disk does, for `repair` to fix."""
    rng = random.Random(seed)
    path = rng.choice(sorted((folder / name / "packs").glob("*/*")))
    data = bytearray(path.read_bytes())
    data[rng.randrange(32, max(33, len(data) // 2))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


WORKS: dict[str, Callable[..., None]] = {
    one.__name__: one for one in (create, delete, prune, collect, copy, carry, repair, restore)
}


def main() -> None:
    """Fork a child for each line, one after the other."""
    for told in sys.stdin:
        asked = json.loads(told)
        child = os.fork()
        if child == 0:
            _child(asked)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _child(asked: dict[str, Any]) -> None:
    status = 1
    try:
        if asked["fault"]:
            os.environ["VMCKPT_FAULT"] = str(asked["fault"])
        passed: list[str] = []
        if asked["record"]:
            fault_injection.listen(passed.append)
        folder, *args = asked["args"]
        WORKS[asked["work"]](Path(folder), *args)
        if asked["record"]:
            Path(str(asked["record"])).write_text(json.dumps(passed))
        status = 0
    except BaseException:  # noqa: BLE001  reported to the campaign
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
