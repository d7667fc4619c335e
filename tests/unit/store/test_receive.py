"""Boxes of another store are taken in without a key."""

from pathlib import Path

from tests.support.storing import (
    assert_whole,
    chunks,
    new_store,
    read,
    write,
)


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
