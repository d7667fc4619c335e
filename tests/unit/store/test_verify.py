"""One changed bit, anywhere in any file of a store, is found, and the file is named."""

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.storing import chunks, new_store, read, references, write
from vmckpt.errors import StoreDamaged
from vmckpt.store import pending_deletion
from vmckpt.store.gc import boxes_of
from vmckpt.store.locks import Lock, LockPurpose
from vmckpt.store.repository import Store
from vmckpt.store.verify import verify


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """One object of every kind."""
    store = new_store(tmp_path / "s")
    with store.receiver(encrypted=True):
        pass
    write(store, "one", [b"a" * 50, b"b" * 60, b"c"], wraps=b"wrapped key")
    write(store, "two", [b"a" * 50, b"d" * 70])
    store.pin("one", "for the audit")
    pending_deletion.write(store.backend, ["wraps/gone"])
    lock = Lock(store.backend, LockPurpose.WRITE)
    lock.take()
    assert [str(one) for one in verify(store, references).wrong] == []
    yield store
    lock.release()


def files(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())


def test_a_flipped_bit_at_any_byte_of_any_object_is_found_and_named(
    store: Store, tmp_path: Path
) -> None:
    rng = random.Random(7)
    kinds = set()
    for name in files(tmp_path / "s"):
        kinds.add(name.partition("/")[0])
        path = tmp_path / "s" / name
        good = path.read_bytes()
        for at in range(len(good)):
            bad = bytearray(good)
            bad[at] ^= 1 << rng.randrange(8)
            path.write_bytes(bad)
            assert name in {one.key for one in verify(store, references, parallel=1).wrong}, at
        path.write_bytes(good)
    assert kinds == {"format", "packs", "snapshots", "wraps", "pins", "locks", "condemned"}
    assert verify(store, references).wrong == ()


@pytest.mark.parametrize("what", ["cut", "empty", "longer", "swapped", "gone"])
def test_other_damage_is_found_and_named_too(store: Store, tmp_path: Path, what: str) -> None:
    for name in files(tmp_path / "s"):
        path = tmp_path / "s" / name
        good = path.read_bytes()
        if what == "gone":
            if not name.startswith("packs/"):
                continue
            path.unlink()
        elif what == "swapped":
            others = [
                one for one in files(tmp_path / "s")
                if one != name and one.partition("/")[0] == name.partition("/")[0]
            ]  # fmt: skip
            if not others or name.startswith("snapshots/"):
                continue
            path.write_bytes((tmp_path / "s" / others[0]).read_bytes())
        else:
            path.write_bytes({"cut": good[:-1], "empty": b"", "longer": good + b"\0"}[what])
        wrong = {one.key for one in verify(store, references).wrong}
        assert name in wrong or (what == "gone" and wrong), name
        path.write_bytes(good)
    assert verify(store, references).wrong == ()


def test_what_is_told_of_a_damaged_pack_is_who_needs_it(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    write(store, "one", chunks(1, 2), pack_size=1 << 20)
    write(store, "two", chunks(2, 3), pack_size=1 << 20)
    [first] = [one for one in store.backend.keys("packs/") if one.size > 2 * 4096]
    path = tmp_path / "s" / first.key
    data = bytearray(path.read_bytes())
    data[4200] ^= 4  # in the second box, which both have
    path.write_bytes(data)

    told = {one.key: one for one in verify(store, references).wrong}
    assert told[first.key].snapshots == ("one", "two")
    assert re.fullmatch(r"chunk \w+ at offset \d+ is damaged", told[first.key].what)
    assert told["snapshots/one"].what == "1 of its 2 chunks without an intact copy"
    assert set(told) == {first.key, "snapshots/one", "snapshots/two"}

    with pytest.raises(StoreDamaged, match=rf"{first.key}: chunk \w+ at offset \d+ is damaged"):
        read(store, "two")


def test_another_whole_copy_of_a_chunk_is_used(tmp_path: Path) -> None:

    one = new_store(tmp_path / "s")
    # It began before, and knows nothing of what the other one stores.
    with one.receiver(encrypted=True) as late:
        write(one, "one", chunks(1, 2))

        [pack] = one.catalog.load().stored
        for name, box, plain in boxes_of(one.backend, pack):
            late.add(name, box, plain)
        late.finish()
        one.publish("two", one.manifest("one"), None, writer=late)
    path = tmp_path / "s" / "packs" / pack[:2] / pack
    path.write_bytes(path.read_bytes()[:100] + bytes(8192))

    assert read(one, "one") == chunks(1, 2)
    found = verify(one, references).wrong
    assert [found_.key for found_ in found] == [f"packs/{pack[:2]}/{pack}"]
    assert found[0].snapshots == ()
