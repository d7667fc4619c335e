"""What a collection removes, condemns, rewrites and leaves alone. Pure.

A pack goes in two steps. It is *condemned* when no manifest needs it: from then on no new writer
counts on what is in it. It is removed by a later collection, after the grace time, if every writer
that is still at work knew of the condemnation when it began, and still no manifest needs it: one
that was at work before may have named it meanwhile, and then it stays.

What manifests need of each pack is told by `homes`; docs/formats.md tells why this is enough.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vmckpt.store.condemned import Condemned
from vmckpt.store.locks import LockSeen, Work
from vmckpt.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class PackUse:
    """A pack, and what of it is needed."""

    id: str
    key: str
    size: int
    at: Seconds
    """When it was written, by the store's clock."""
    generation: int
    needed: int
    """Bytes of a pack with nothing but the boxes whose home it is; 0: nobody needs it."""
    condemned: bool
    foreign: bool = False
    """See `packs`."""


@dataclass(frozen=True, slots=True)
class Loose:
    """A small object that belongs to a snapshot which is not there."""

    key: str
    at: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How long to wait, and when a rewrite is worth it."""

    grace: Seconds
    """How long before what nobody needs is condemned, and again before it is removed."""
    life: Seconds
    """How long after its last sign of life somebody is taken for dead."""
    sparse: float = 0.5
    """A pack of which less than this part is needed is rewritten."""
    small: Bytes = Bytes(8 << 20)
    few: int = 8
    """So many packs smaller than `small` are put together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A store as a collection finds it. Locks were looked at before manifests."""

    packs: Sequence[PackUse]
    condemned: Sequence[Condemned]
    locks: Sequence[LockSeen]
    loose: Sequence[Loose]
    leftovers: Mapping[str, Seconds]
    """What puts that never ended have left, and since when."""
    now: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, in this order."""

    remove: Mapping[str, tuple[str, ...]]
    """By condemnation: the objects that go. Then it is closed; what it named besides stays."""
    waiting: Mapping[str, str]
    """By condemnation: why it is left for later."""
    rewrite: tuple[str, ...]
    """Packs whose needed boxes go into new packs; they are condemned then."""
    condemn: tuple[str, ...]
    """Objects that nobody needs."""
    clear: tuple[str, ...]
    """Leftovers."""


def dead_locks(found: Sequence[LockSeen], now: Seconds, terms: Terms) -> tuple[str, ...]:
    """Those whose owners are gone; a collection's is taken over by the next one."""
    return tuple(
        one.key for one in found if not one.alive(now, terms.life) and one.work is not Work.GC
    )


def decide(scene: Scene, terms: Terms) -> Decision:
    """Look at all of it once."""
    # What is not known to be useless stays: also a pack that cannot be read.
    useless = {pack.key for pack in scene.packs if not pack.needed}
    useless |= {one.key for one in scene.loose}
    alive = [one for one in scene.locks if one.alive(scene.now, terms.life)]
    remove, waiting = {}, {}
    for one in scene.condemned:
        why = _hindered(one, alive, scene.now, terms)
        if why is None:
            remove[one.token] = tuple(key for key in one.keys if key in useless)
        else:
            waiting[one.token] = why
    judged = {key for one in scene.condemned for key in one.keys}
    found = [(pack.key, pack.at) for pack in scene.packs] + [
        (one.key, one.at) for one in scene.loose
    ]
    return Decision(
        remove=remove,
        waiting=waiting,
        rewrite=_worth_rewriting(scene, terms),
        condemn=tuple(
            key for key, at in found
            if key in useless and key not in judged and _old(at, scene, terms)
        ),
        clear=tuple(
            name for name, at in scene.leftovers.items()
            if scene.now - at >= max(terms.grace, terms.life)
        ),
    )  # fmt: skip


def _hindered(one: Condemned, alive: Sequence[LockSeen], now: Seconds, terms: Terms) -> str | None:
    """Why a condemnation cannot be carried out yet."""
    if now - one.at < terms.grace:
        return (
            f"condemned {max(0.0, now - one.at):.0f} s ago; the grace time is {terms.grace:.0f} s"
        )
    for lock in alive:
        if lock.work in (Work.WRITE, None) and one.token not in lock.knows:
            return f"{lock.owner} was at work before"
    return None


def _worth_rewriting(scene: Scene, terms: Terms) -> tuple[str, ...]:
    """Packs with much that nobody needs, and small ones if there are many."""
    usable = [
        pack for pack in scene.packs
        if pack.needed and not pack.condemned and _old(pack.at, scene, terms)
    ]  # fmt: skip
    sparse = {pack.id for pack in usable if pack.needed < terms.sparse * pack.size}
    chosen = sparse
    for foreign in (False, True):
        small = {
            pack.id for pack in usable if pack.size < terms.small and pack.foreign is foreign
        }  # fmt: skip
        chosen |= small if len(small) >= terms.few else set()
    return tuple(pack.id for pack in usable if pack.id in chosen)


def _old(at: Seconds, scene: Scene, terms: Terms) -> bool:
    """Whether something is old enough: a writer at work may name what is young in a moment."""
    return scene.now - at >= terms.grace
