"""Finding a snapshot in whichever stores have it, the first of the inventory first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vmckpt.errors import NotInStore, StoreDamaged, StoreError
from vmckpt.model.disk import StorePlace
from vmckpt.snapshot import keeping
from vmckpt.store.format import manifest
from vmckpt.store.repository import Store

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


def find(places: Sequence[StorePlace], open_: Open, word: str) -> Found:
    """Look for a snapshot by id, its beginning, or name. Raises NotInStore, BadInput, StoreError.

    A name means what the first store that knows it means by it. A store that does not answer is
    passed over if another one has it.
    """
    if len(places) == 1:
        store = open_(places[0])
        return Found(id=keeping.find(store, word), tiers=(Tier(places[0], store),))
    opened, silent = _opened(places, open_)
    if silent and not opened:
        raise next(iter(silent.values()))
    id_, said = _named(opened, word)
    if id_ is None:
        said += [f"{name} does not answer ({exc.message})" for name, exc in silent.items()]
        raise NotInStore("; ".join(said), mend="vmckpt snapshot list shows them")
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
            return keeping.find(one.store, word), []
        except NotInStore as exc:
            said.append(exc.message)
    return None, said


def _whole(one: Tier, id_: str) -> bool:
    try:
        found = manifest.decode(one.store.manifest(id_), id_, None)
        keeping.wrapped_of(one.store, found)
    except (StoreDamaged, NotInStore):
        return False
    except StoreError:
        return True  # a newer version, say: that is for whoever reads it to tell
    return True
