"""A small snapshot, to be changed by `dataclasses.replace`."""

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import strategies as st

from tests.fixtures.make_store_v1 import DATA_KEY, FACTS, ID, PUBLIC, SALT, SIGNING, WRITER, private
from vmckpt.store.format.chunk_map import SLOTS, UNIT, ZERO, Kind, Map
from vmckpt.store.format.manifest import Keys
from vmckpt.store.format.metadata import PrivateFacts
from vmckpt.store.format.private_part import Private, RegionMap
from vmckpt.units import Bytes

__all__ = ["FACTS", "ID", "KEYS", "OPEN", "PUBLIC", "TRUSTED", "bare", "maps", "private", "ram"]

KEYS = Keys(SIGNING, SALT, DATA_KEY)
OPEN = Keys(SIGNING)
TRUSTED = frozenset({WRITER})
BARE = PrivateFacts(domain_xml="", cpu_xml=None, boot_files=(), ram=(), disks=())


def ram(values: Sequence[int], name: str = "pc.ram", kind: Kind = Kind.RAM) -> RegionMap:
    """A region by its map; -1 is zeros."""
    numbers = np.array([int(ZERO) if one < 0 else one for one in values], dtype=np.uint32)
    return RegionMap(name=name, kind=kind, size=Bytes(len(values) * UNIT[kind]), map=numbers)


def bare(
    regions: Sequence[RegionMap], chunks: Sequence[bytes], files: Mapping[str, bytes] | None = None
) -> Private:
    """A private part with nothing but regions."""
    return Private(facts=BARE, chunks=chunks, regions=tuple(regions), files=files or {})


def maps(chunks: int, most: int = 300) -> st.SearchStrategy[Map]:
    """Maps over a table of that many chunks."""
    number = st.integers(0, chunks * SLOTS - 1) if chunks else st.nothing()
    return st.lists(st.just(int(ZERO)) | number, max_size=most).map(
        lambda values: np.array(values, dtype=np.uint32)
    )
