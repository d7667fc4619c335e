"""Boxes of another store are taken in without a key."""

from pathlib import Path

import pytest
from blake3 import blake3

from tests.support.storing import (
    SEALING,
    assert_whole,
    chunk,
    chunks,
    new_store,
    read,
    write,
)
from vmckpt.errors import StoreDamaged
from vmckpt.store.chunk_index import names_of
from vmckpt.store.format.pack import box_hash
from vmckpt.store.format.sealing import Plain
from vmckpt.store.receive import Present


def test_sealed_boxes_go_from_store_to_store_without_a_key(tmp_path: Path) -> None:
    from vmckpt.store.gc import boxes_of  # noqa: PLC0415

    near, far = new_store(tmp_path / "near"), new_store(tmp_path / "far")
    write(near, "one", chunks(*range(9)))
    with far.receiver(encrypted=True) as writer:
        for pack in near.catalog.load().stored:
            for name, box, plain in boxes_of(near.backend, pack):
                writer.add(name, box, plain)
        writer.finish()
        far.publish("one", near.manifest("one"), near.wraps("one"), writer=writer)

    assert read(far, "one") == chunks(*range(9))
    assert_whole(far)


def test_who_cannot_open_a_box_counts_on_it_for_nobody_else(tmp_path: Path) -> None:
    """Else a wrong box under a right name would do harm to the store's own snapshots."""
    store = new_store(tmp_path / "s")
    name, box = SEALING.name_of(blake3(b"a").digest()), b"who knows"
    with store.receiver(encrypted=True) as receiver:
        receiver.add(name, box, 1)
        assert receiver.finish().chunks_new == 1
    present = Present.of(store.catalog.load().index)

    assert len(present.missing(names_of([name]))) == 1
    assert present.same(name, box_hash(box))
    assert not present.same(name, box_hash(b"another"))


def test_what_is_not_encrypted_is_compared_with_its_name(tmp_path: Path) -> None:
    store, sealing = new_store(tmp_path / "s"), Plain()
    plain = chunk(1)
    digest = blake3(plain).digest()
    name, box = sealing.name_of(digest), sealing.seal(plain, digest)
    with store.receiver(encrypted=False) as receiver:
        receiver.add(name, box, len(plain))
        with pytest.raises(StoreDamaged, match="its length does not match its index row"):
            receiver.add(name, box, len(plain) - 1)
        with pytest.raises(StoreDamaged):
            receiver.add(sealing.name_of(bytes(32)), box, len(plain))
        receiver.finish()

    assert len(Present.of(store.catalog.load().index).missing(names_of([name]))) == 0
