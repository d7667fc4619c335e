"""The parent state: a host's record of a snapshot. The next snapshot then stores only changes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from vmckpt.agent.snapshot.memory_methods import Memory
from vmckpt.capture.disks.plan import Parent
from vmckpt.store import parent_state
from vmckpt.store.format.chunk_map import SLOTS, ZERO, Kind, Map, slots_of
from vmckpt.store.format.private_part import Private
from vmckpt.store.parent_state import Draft, ParentState
from vmckpt.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The published snapshot, which becomes the parent of the next snapshot."""

    snapshot: str
    epoch: int
    made_at: int
    checkpoint: str | None
    """ID of the snapshot since which libvirt has tracked disk writes; None: it tracks no writes."""
    memory: Memory | None
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Image path of each disk, by disk name."""


def parent(past: ParentState | None) -> Parent | None:
    """Return the snapshot since which libvirt has tracked disk writes; None if it tracks none."""
    if past is None or (since := checkpoint(past)) is None:
        return None
    sizes = {name: Bytes(size) for name, size in past.extra.get("disks", {}).items()}
    sources = {str(name): str(path) for name, path in past.extra.get("sources", {}).items()}
    made_at = int(past.extra.get("made_at", 0))
    return Parent(id=since, made_at=made_at, sizes=sizes, sources=sources)


def checkpoint(past: ParentState) -> str | None:
    """Return the ID of the snapshot since which libvirt has tracked disk writes, or None.

    A snapshot of a guest that is off creates no checkpoint. The previous checkpoint stays in use.
    """
    told = past.extra.get("checkpoint", past.snapshot)
    return None if told is None else str(told)


def went_back(state: str, guest: str, snapshot: str) -> None:
    """Record that the guest was restored to `snapshot`, which becomes the next snapshot's parent.

    Fingerprints of pages and chunks stay valid, since they are compared with the data. libvirt's
    checkpoint is dropped, since it tracked the guest's writes before the restore. Raises OSError.
    """
    for folder in (Path(state) / "lines").glob(f"{guest}-*"):
        parent_state.amend(folder, {"parent": snapshot, "checkpoint": None, "copy": None})


def before(past: ParentState | None) -> str | None:
    """Return the ID of the next snapshot's parent; None if the next snapshot has no parent."""
    return None if past is None else str(past.extra.get("parent", past.snapshot))


def others(mine: Path, guest: str) -> list[str]:
    """Return the checkpoints of the guest's parent states, except the parent state in `mine`."""
    folders = [one for one in mine.parent.glob(f"{guest}-*") if one != mine]
    found = [checkpoint(one) for one in map(parent_state.load, folders) if one is not None]
    return [one for one in found if one is not None]


def unchanged(past: ParentState | None, memory: Memory) -> bool:
    """Return whether `memory.changed` is relative to the snapshot of this parent state."""
    number = None if past is None else past.extra.get("copy")
    return memory.changed is not None and number is not None and number == memory.since


def keep(draft: Draft, private: Private, past: ParentState | None, end: End) -> None:
    """Write the parent state for the next snapshot. Raises OSError.

    `private`: of the new snapshot; `past`: the state of the previous snapshot, if any; `end`: facts
    about the new snapshot. After a snapshot without memory, the previous memory maps are kept,
    since they remain valid.
    """
    maps = {region.name: region.map for region in private.regions}
    chunks = private.chunks
    sizes = {one.name: one.size for one in private.regions if one.kind is Kind.DISK}
    copy = None if end.memory is None else end.memory.copy
    if past is not None and end.memory is None:
        chunks = list(chunks)
        maps |= _carried(draft, past, chunks)
        copy = past.extra.get("copy")
    extra = {
        "epoch": end.epoch, "made_at": end.made_at, "disks": sizes, "checkpoint": end.checkpoint,
        "copy": copy, "sources": dict(end.sources),
    }  # fmt: skip
    draft.keep(end.snapshot, chunks, maps, extra)


def _carried(draft: Draft, past: ParentState, chunks: list[bytes]) -> dict[str, Map]:
    """Append the chunks of the previous memory maps to `chunks`. Returns the adapted maps."""
    maps = {}
    for name, region in past.regions.items():
        if region.prints is None:
            continue
        size = len(region.map) * 4096
        draft.prints(name, Kind.RAM, size)[:] = region.prints
        maps[name] = _moved(region.map, past.chunks, chunks)
    return maps


def _moved(map_: Map, table: Sequence[bytes], chunks: list[bytes]) -> Map:
    made = np.array(map_)
    there = made != ZERO
    olds, slots = slots_of(made[there])
    used, places = np.unique(olds, return_inverse=True)
    first = len(chunks)
    chunks += _picked(table, used.tolist())
    made[there] = (places.astype(np.uint32) + np.uint32(first)) * np.uint32(SLOTS) + slots
    return made


def _picked(table: Sequence[bytes], these: Iterable[int]) -> list[bytes]:
    return [table[one] for one in these]
