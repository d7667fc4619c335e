"""Opening a store where the inventory says it is, and no other one that lies there."""

from dataclasses import replace
from pathlib import Path

from vmckpt.errors import NotInStore, StoreError
from vmckpt.model.disk import StorePlace
from vmckpt.store.places import backend_of
from vmckpt.store.store import Store


def opened(place: StorePlace, *, cache: Path | None = None) -> Store:
    """The store of a place. Raises StoreError, also if it is not the one that is meant: a folder
    where nothing is mounted may have a store of its own, and nobody would look for it there."""
    try:
        store = Store.open(backend_of(place.url), cache=cache)
    except NotInStore as exc:
        if place.id is not None:
            exc.mend = "is it mounted there?"
        raise
    if place.id not in (None, store.id):
        raise StoreError(
            f"{store.backend.where} is another store here than {place.name} is for its controller",
            mend="is it mounted there?",
        )
    return store


def identified(place: StorePlace) -> StorePlace:
    """A place with the id of its store, if that can be seen from here."""
    try:
        return replace(place, id=opened(place).id)
    except StoreError:
        return place  # whoever works there tells what is wrong with it
