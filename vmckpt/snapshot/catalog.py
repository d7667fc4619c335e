"""Find a snapshot in one store or in any (in the inventory's order), and open it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from vmckpt.errors import (
    BadInput,
    KeyRefused,
    NotInStore,
    StoreDamaged,
    StoreError,
    StoreNewer,
    meant,
)
from vmckpt.model.disk import StorePlace
from vmckpt.model.events import Copied
from vmckpt.store import snapshot_list
from vmckpt.store.chunk_index import Names
from vmckpt.store.format import manifest
from vmckpt.store.format.manifest import Manifest
from vmckpt.store.format.metadata import Public
from vmckpt.store.format.private_part import Private
from vmckpt.store.format.sealing import Sealing
from vmckpt.store.keys import wrapped_keys
from vmckpt.store.repository import Store, is_id
from vmckpt.units import Bytes

Identity = Callable[[], X25519PrivateKey]
"""Loads the key that opens snapshots, and may ask for its passphrase: called only if one is needed.
Raises KeyRefused."""
Progress = Callable[[Copied], None]
_BEGINS = "s-"
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """A snapshot as it can be seen without a key."""

    data: bytes
    found: Manifest
    pinned: bool
    trusted: bool
    """It was signed by a writer that is trusted here."""
    keys: tuple[str, ...]
    """Fingerprints of the keys that open it."""
    wrong: str | None
    """Why it cannot be told which keys open it."""

    @property
    def public(self) -> Public:
        return self.found.public


def silent(_: Copied) -> None:
    """Nobody wants to know."""


def copied_so_far(phase: str, done: int, total: int | None = None, new: int = 0) -> Copied:
    """How far a work is."""
    of = None if total is None else Bytes(total)
    return Copied(phase=phase, done=Bytes(done), total=of, new=Bytes(new))


def references(data: bytes) -> Names:
    """What a manifest names, for collections and checks, which say themselves whose it is."""
    try:
        return manifest.references(data).array()
    except (StoreDamaged, StoreNewer) as exc:
        what = exc.message.removeprefix("snapshots/?").lstrip(": ")
        raise type(exc)(what, hint=exc.hint) from exc


def find(store: Store, word: str) -> str:
    """The id of a snapshot, by its id, the beginning of it, or its name.

    Raises NotInStore, and BadInput, naming them, if there are several.
    """
    if is_id(word) and any(store.backend.keys(f"snapshots/{word}")):
        return word
    known = snapshot_list.names(store)
    found = match_ids(word, {id_: None if one is None else one.name for id_, one in known.items()})
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(_described(id_, known[id_]) for id_ in found[:_MOST_NAMED])
        more = len(found) - _MOST_NAMED
        rest = f" and {more} more" if more > 0 else ""
        raise BadInput(f"{word!r} may be {shown}{rest}", hint="name one by its id")
    unread = sum(one is None for one in known.values())
    called = [one.name for one in known.values() if one is not None and one.name is not None]
    beside = f"; of {unread} the name cannot be read" if unread else ""
    raise NotInStore(
        f"{store.backend.where} has no snapshot {word!r}{beside}",
        hint=meant(word, called, "vmckpt snapshot list shows them"),
    )


def match_ids(word: str, names: Mapping[str, str | None]) -> tuple[str, ...]:
    """The ids that a word may mean, of all ids with their names. Pure.

    A beginning that is somebody's name, too, means both: nobody deletes the wrong one by chance.
    """
    if word in names:
        return (word,)
    begins = word.startswith(_BEGINS) and len(word) > len(_BEGINS)
    return tuple(
        id_ for id_, name in sorted(names.items())
        if name == word or (begins and id_.startswith(word))
    )  # fmt: skip


def readable(store: Store, ids: Collection[str] | None = None) -> dict[str, Public]:
    """What snapshots tell of themselves, without those that cannot be read."""
    told = snapshot_list.proved(store, ids)
    return {id_: one for id_, one in told.items() if isinstance(one, Public)}


def inspect(store: Store, id_: str, trusted: Collection[bytes]) -> Looked:
    """Look at a snapshot without a key. Raises StoreError."""
    data = store.manifest(id_)
    found = manifest.decode(data, id_, None)
    keys: tuple[str, ...] = ()
    wrong = None
    if found.encrypted:
        try:
            keys = wrapped_keys.recipients(_wrapped(store, id_), id_)
        except (StoreDamaged, StoreNewer) as exc:
            wrong = exc.message
    return Looked(
        data=data,
        found=found,
        pinned=id_ in store.pins(),
        trusted=bytes.fromhex(found.public.signer) in trusted,
        keys=keys,
        wrong=wrong,
    )


def opened(
    store: Store, looked: Looked, identity: Identity | None, trusted: Collection[bytes]
) -> tuple[Private, Sealing]:
    """The private part of a snapshot that a trusted writer signed. Raises StoreError."""
    found = manifest.decode(looked.data, looked.public.id, trusted)
    return found.opened(data_key(store, found, identity))


def data_key(store: Store, found: Manifest, identity: Identity | None) -> bytes | None:
    """What opens a snapshot; None: it is not encrypted. Raises StoreError."""
    if not found.encrypted:
        return None
    id_ = found.public.id
    if identity is None:
        raise KeyRefused(
            f"snapshot {id_} is encrypted",
            hint="name an identity with --identity, or by VMCKPT_IDENTITY",
        )
    return wrapped_keys.unwrap(_wrapped(store, id_), id_, identity())


def _wrapped(store: Store, id_: str) -> bytes:
    wrapped = store.wraps(id_)
    if wrapped is None:
        raise StoreDamaged(
            f"{store.backend.where}: wraps/{id_} is missing: nobody can open the snapshot",
            hint="bring it back from another tier or a copy",
        )
    return wrapped


def wrapped_of(store: Store, found: Manifest) -> bytes | None:
    """The wrapped keys of a snapshot, whole; None: it is not encrypted. Raises StoreError."""
    if not found.encrypted:
        return None
    wrapped = _wrapped(store, found.public.id)
    wrapped_keys.recipients(wrapped, found.public.id)
    return wrapped


def time_text(at: float) -> str:
    """A time as snapshots show it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _described(id_: str, public: Public | None) -> str:
    if public is None:
        return id_
    return f"{id_} ({public.name}, of {public.guest}, {time_text(public.made_at)})"


Open = Callable[[StorePlace], Store]


@dataclass(frozen=True, slots=True)
class Tier:
    """One store that has it."""

    place: StorePlace
    store: Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A snapshot, and where it is."""

    id: str
    tiers: tuple[Tier, ...]
    """At least one; those whose manifest and keys are whole first."""

    @property
    def store(self) -> Store:
        """The one to read from."""
        return self.tiers[0].store


def find_anywhere(places: Sequence[StorePlace], open_: Open, word: str) -> Found:
    """Look for a snapshot by id, its beginning, or name. Raises NotInStore, BadInput, StoreError.

    A name means what the first store that knows it means by it. A store that does not answer is
    passed over if another one has it.
    """
    if len(places) == 1:
        store = open_(places[0])
        return Found(id=find(store, word), tiers=(Tier(places[0], store),))
    opened, silent = _opened(places, open_)
    if silent and not opened:
        raise next(iter(silent.values()))
    id_, said = _named(opened, word)
    if id_ is None:
        said += [f"{name} does not answer ({exc.message})" for name, exc in silent.items()]
        raise NotInStore("; ".join(said), hint="vmckpt snapshot list shows them")
    having = [one for one in opened if any(one.store.backend.keys(f"snapshots/{id_}"))]
    return Found(id=id_, tiers=tuple(sorted(having, key=lambda one: not _whole(one, id_))))


def _opened(
    places: Sequence[StorePlace], open_: Open
) -> tuple[list[Tier], dict[str, StoreError]]:  # fmt: skip
    opened, silent = [], {}
    for place in places:
        try:
            opened.append(Tier(place, open_(place)))
        except StoreError as exc:
            silent[place.name] = exc
    return opened, silent


def _named(opened: Sequence[Tier], word: str) -> tuple[str | None, list[str]]:
    """The id, or what each store says of that word."""
    said = []
    for one in opened:
        try:
            return find(one.store, word), []
        except NotInStore as exc:
            said.append(exc.message)
    return None, said


def _whole(one: Tier, id_: str) -> bool:
    try:
        found = manifest.decode(one.store.manifest(id_), id_, None)
        wrapped_of(one.store, found)
    except (StoreDamaged, NotInStore):
        return False
    except StoreError:
        return True  # a newer version, say: that is for whoever reads it to tell
    return True
