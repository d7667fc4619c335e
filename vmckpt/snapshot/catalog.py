"""Find a snapshot in one store or in all stores (in the inventory's order), and open it."""

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
"""Loads the key that opens snapshots, and may ask for its passphrase. Called only if a key is
needed. Raises KeyRefused."""
Progress = Callable[[Copied], None]
_BEGINS = "s-"
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """The part of a snapshot that is readable without a key."""

    data: bytes
    found: Manifest
    pinned: bool
    trusted: bool
    """Whether the snapshot was signed by a trusted writer."""
    keys: tuple[str, ...]
    """Fingerprints of the keys that open the snapshot."""
    wrong: str | None
    """Why the keys that open the snapshot are unknown; None if they are known."""

    @property
    def public(self) -> Public:
        return self.found.public


def silent(_: Copied) -> None:
    """Ignore progress."""


def copied_so_far(phase: str, done: int, total: int | None = None, new: int = 0) -> Copied:
    """Return a progress event. `done`, `total`, `new`: in bytes; `total` is None if unknown.

    `phase`: what is being done, such as "copy".
    """
    of = None if total is None else Bytes(total)
    return Copied(phase=phase, done=Bytes(done), total=of, new=Bytes(new))


def references(data: bytes) -> Names:
    """Return the names of the chunks that a manifest needs, as `gc.References`.

    Raises StoreDamaged, StoreNewer; the message does not name the snapshot, as callers add its ID.
    """
    try:
        return manifest.references(data).array()
    except (StoreDamaged, StoreNewer) as exc:
        what = exc.message.removeprefix("snapshots/?").lstrip(": ")
        raise type(exc)(what, hint=exc.hint) from exc


def find(store: Store, word: str) -> str:
    """Return the ID of a snapshot, given its ID, a prefix of the ID, or its name.

    Raises NotInStore, StoreError, and BadInput with the candidates if the word is ambiguous.
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
        raise BadInput(f"{word!r} is ambiguous: {shown}{rest}", hint="use the snapshot's ID")
    unread = sum(one is None for one in known.values())
    called = [one.name for one in known.values() if one is not None and one.name is not None]
    beside = f"; snapshots with unreadable names: {unread}" if unread else ""
    raise NotInStore(
        f"{store.backend.where} has no snapshot {word!r}{beside}",
        hint=meant(word, called, "run vmckpt snapshot list"),
    )


def match_ids(word: str, names: Mapping[str, str | None]) -> tuple[str, ...]:
    """Return the IDs of snapshots to which a word may refer. `names`: all names, by ID. Pure.

    A word that is a prefix of one ID and the name of another snapshot is ambiguous, so the wrong
    snapshot cannot be deleted by accident.
    """
    if word in names:
        return (word,)
    begins = word.startswith(_BEGINS) and len(word) > len(_BEGINS)
    return tuple(
        id_ for id_, name in sorted(names.items())
        if name == word or (begins and id_.startswith(word))
    )  # fmt: skip


def readable(store: Store, ids: Collection[str] | None = None) -> dict[str, Public]:
    """Return the public parts of snapshots by ID; snapshots that cannot be read are omitted.

    `ids` are the snapshots to read; None: all. Raises StoreError.
    """
    told = snapshot_list.proved(store, ids)
    return {id_: one for id_, one in told.items() if isinstance(one, Public)}


def inspect(store: Store, id_: str, trusted: Collection[bytes]) -> Looked:
    """Read a snapshot's metadata without a key. Raises StoreError.

    `id_`: the snapshot's ID; `trusted`: public keys of trusted writers.
    """
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
    """Return a snapshot's private part and the sealing of its chunks.

    Raises KeyRefused if the writer is not trusted or the identity does not open the snapshot, and
    StoreError.
    """
    found = manifest.decode(looked.data, looked.public.id, trusted)
    return found.opened(data_key(store, found, identity))


def data_key(store: Store, found: Manifest, identity: Identity | None) -> bytes | None:
    """Return the data key of a snapshot; None if it is not encrypted.

    Raises KeyRefused if there is no identity or it does not open the snapshot, and StoreError.
    """
    if not found.encrypted:
        return None
    id_ = found.public.id
    if identity is None:
        raise KeyRefused(
            f"snapshot {id_} is encrypted",
            hint="give an identity file with --identity or VMCKPT_IDENTITY",
        )
    return wrapped_keys.unwrap(_wrapped(store, id_), id_, identity())


def _wrapped(store: Store, id_: str) -> bytes:
    wrapped = store.wraps(id_)
    if wrapped is None:
        raise StoreDamaged(
            f"{store.backend.where}: wraps/{id_} is missing, so the snapshot cannot be opened",
            hint="run vmckpt snapshot verify --repair --from STORE",
        )
    return wrapped


def wrapped_of(store: Store, found: Manifest) -> bytes | None:
    """Return the wrapped keys of a snapshot after checking them; None if it is not encrypted.

    Raises StoreError.
    """
    if not found.encrypted:
        return None
    wrapped = _wrapped(store, found.public.id)
    wrapped_keys.recipients(wrapped, found.public.id)
    return wrapped


def time_text(at: float) -> str:
    """Format the time of a snapshot: in UTC, to the second."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _described(id_: str, public: Public | None) -> str:
    if public is None:
        return id_
    return f"{id_} ({public.name}, of {public.guest}, {time_text(public.made_at)})"


Open = Callable[[StorePlace], Store]


@dataclass(frozen=True, slots=True)
class Tier:
    """A store that has the snapshot."""

    place: StorePlace
    store: Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A snapshot and the stores that have it."""

    id: str
    tiers: tuple[Tier, ...]
    """The stores, at least one; stores with intact manifest and keys come first."""

    @property
    def store(self) -> Store:
        """The store to read from."""
        return self.tiers[0].store


def find_anywhere(places: Sequence[StorePlace], open_: Open, word: str) -> Found:
    """Find a snapshot by its ID, a prefix of the ID, or its name.

    `open_`: opens a store; `word`: the ID, prefix or name. A name refers to the snapshot of that
    name in the first store that has one. Stores that do not answer are skipped. Raises NotInStore,
    BadInput if the word is ambiguous, and StoreError if no store answers.
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
        raise NotInStore("; ".join(said), hint="run vmckpt snapshot list")
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
    """Return the ID of a snapshot, or None and the message of each store."""
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
        return True  # for example a newer version, reported when the snapshot is read
    return True
