"""Puts the boxes that are needed of some packs into new packs, as they are: no key is needed."""

from collections.abc import Iterator, Mapping, Sequence

from vmckpt.errors import NotInStore, StoreDamaged, StoreNewer
from vmckpt.store import packs
from vmckpt.store.backend import Backend
from vmckpt.store.index import Names
from vmckpt.store.packing import Packing


def rewrite(
    backend: Backend, homes: Mapping[str, Names], generation: int, chosen: Sequence[str], *,
    foreign: bool,
) -> tuple[str, ...]:  # fmt: skip
    """Write the new packs; the old ones of which every needed box is safe now.

    What is foreign stays so. A pack that is damaged stays as it is. Raises StoreError.
    """
    packing = Packing(backend, lambda _info, _rows: None, generation=generation, foreign=foreign)
    done = []
    try:
        for pack in chosen:
            wanted = {name.tobytes() for name in homes[pack]}
            try:
                boxes = list(boxes_of(backend, pack, wanted))
            except (NotInStore, StoreDamaged, StoreNewer):
                continue
            for name, box, plain in boxes:
                packing.add(name, box, plain)
            done.append(pack)
        packing.finish()
    finally:
        packing.close()
    return tuple(done)


def boxes_of(
    backend: Backend, pack: str, wanted: "set[bytes] | None" = None
) -> Iterator[tuple[bytes, memoryview, int]]:
    """Boxes of a pack with their names and plain lengths, each compared with its hash.

    Raises NotInStore, StoreDamaged, StoreNewer.
    """
    key = packs.key_of(pack)
    data = backend.get(key)
    index = packs.parse_tail(data, len(data))
    view = memoryview(data)
    for name, offset, length, plain, told in index.rows.tolist():
        if wanted is not None and name not in wanted:
            continue
        box = view[offset : offset + length]
        if packs.box_hash(box) != told:
            raise StoreDamaged(
                f"{backend.where}: {key}: the box of chunk {name.hex()[:16]} at {offset} is damaged"
            )
        yield name, box, plain
