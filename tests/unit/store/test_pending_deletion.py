"""Lists of what a collection will remove once nobody can count on it."""

from pathlib import Path

import pytest

from tests.support.storing import new_store
from vmckpt.errors import StoreDamaged
from vmckpt.store import locks, pending_deletion
from vmckpt.store.format import manifest, pack
from vmckpt.store.locks import Lock, LockPurpose
from vmckpt.store.repository import Store

PACK = "0" * 64
KEYS = (pack.key_of(PACK), "wraps/s-1")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path / "s")


def test_a_list_is_read_as_it_was_written(store: Store) -> None:
    token = pending_deletion.write(store.backend, KEYS)
    (found,) = pending_deletion.load(store.backend)

    assert (found.token, found.keys, found.packs) == (token, KEYS, (PACK,))
    assert pending_deletion.write(store.backend, KEYS) != token


def test_a_writer_counts_on_none_of_it_and_its_lock_says_so(store: Store) -> None:
    token = pending_deletion.write(store.backend, KEYS)
    lock = Lock(store.backend, LockPurpose.WRITE)
    lock.take()
    try:
        assert pending_deletion.known_to(lock, store.backend) == {PACK}
        (seen,) = locks.list_locks(store.backend)
        assert token in seen.knows
    finally:
        lock.release()


@pytest.mark.parametrize("values", [{}, {"keys": 7}, {"keys": ["../../etc/passwd"]}])
def test_a_list_that_makes_no_sense_stops_everybody(
    store: Store, values: dict[str, object]
) -> None:
    store.backend.put("condemned/x", manifest.written("condemned/x", values))
    with pytest.raises(StoreDamaged, match="condemned/x has no valid list of keys"):
        pending_deletion.load(store.backend)

    store.backend.put("condemned/x", b"noise", replace=True)
    with pytest.raises(StoreDamaged, match="condemned/x"):
        pending_deletion.load(store.backend)
