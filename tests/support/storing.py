"""A small store, snapshots that are lists of chunks, and what must always be true of both."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from blake3 import blake3

from vmckpt.errors import StoreDamaged
from vmckpt.store.backend.base import Backend
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.chunk_index import Names, names_of
from vmckpt.store.format.sealing import Encrypted
from vmckpt.store.gc import Collected, collect, live_names
from vmckpt.store.gc_plan import use_of
from vmckpt.store.pack_writer import Written
from vmckpt.store.repository import Store
from vmckpt.store.verify import verify
from vmckpt.units import Seconds

SEALING = Encrypted(bytes(range(32)))
SMALL = 20_000
"""Bytes of a pack: four chunks that do not compress."""


def chunk(number: int, size: int = 4096) -> bytes:
    """Bytes that no compression makes smaller, the same for the same number."""
    return hashlib.shake_128(str(number).encode()).digest(size)


def chunks(*numbers: int) -> list[bytes]:
    return [chunk(number) for number in numbers]


def manifest_of(digests: Iterable[bytes]) -> bytes:
    """A manifest for tests: digests and names, and a checksum."""
    body = b"".join(digest + SEALING.name_of(digest) for digest in digests)
    return body + blake3(body).digest()


def parsed(manifest: bytes) -> tuple[list[bytes], list[bytes]]:
    """Digests and names. Raises StoreDamaged."""
    body, tail = manifest[:-32], manifest[-32:]
    if blake3(body).digest() != tail or len(body) % 64:
        raise StoreDamaged("the manifest is damaged: its checksum does not match")
    pairs = [body[at : at + 64] for at in range(0, len(body), 64)]
    return [pair[:32] for pair in pairs], [pair[32:] for pair in pairs]


def references(manifest: bytes) -> Names:
    return names_of(parsed(manifest)[1])


def new_store(folder: Path, cache: Path | None = None) -> Store:
    return Store.create(LocalFolder(folder), cache=cache)


def write(
    store: Store, id_: str, plain: Sequence[bytes], *,
    wraps: bytes | None = b"a key", pack_size: int = SMALL, parallel: int = 1,
) -> Written:  # fmt: skip
    """Make a snapshot of chunks."""
    with store.writer(SEALING, pack_size=pack_size, parallel=parallel) as writer:
        coming = [writer.add(one) for one in plain]
        written = writer.finish()
        digests = [one.result() for one in coming]
        store.publish(id_, manifest_of(digests), wraps, writer=writer)
    return written


def read(store: Store, id_: str) -> list[bytes]:
    digests, _ = parsed(store.manifest(id_))
    with store.reader(SEALING) as reader:
        return list(reader.read_many(digests))


def assert_whole(store: Store) -> None:
    """Every published snapshot can be proved and read."""
    assert [str(one) for one in verify(store, references).wrong] == []
    for one in store.manifests():
        digests, _ = parsed(store.manifest(one.id))
        assert [blake3(plain).digest() for plain in read(store, one.id)] == digests


def gc(store: Store, *, grace: float = 0.0, life: float = 900.0) -> Collected:
    return collect(store, references, grace=Seconds(grace), life=Seconds(life))


def assert_no_garbage(store: Store) -> None:
    """After collections by somebody to whom all others are dead, only what is needed is left."""
    for _ in range(3):
        gc(store, life=0.0)
    left = [one.key for prefix in ("locks/", "condemned/") for one in store.backend.keys(prefix)]
    left += [one.key for one in store.backend.leftovers()]
    there = {one.id for one in store.manifests()}
    for prefix in ("wraps/", "pins/"):
        owners = {one.key.rpartition("/")[2] for one in store.backend.keys(prefix)}
        left += sorted(owners - there)
    assert left == []
    assert useless_packs(store) == set()


def useless_packs(store: Store) -> set[str]:
    """Packs of which no snapshot needs anything."""
    listing = store.catalog.load()
    use = use_of(listing.index, frozenset(), live_names(store, references))
    return set(listing.stored) - set(use.needed)


def all_keys(backend: Backend) -> list[str]:
    prefixes = ("format", "packs/", "snapshots/", "wraps/", "pins/", "locks/", "condemned/")
    return [one.key for prefix in prefixes for one in backend.keys(prefix)]
