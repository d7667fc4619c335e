"""What packs a store has, read once."""

from pathlib import Path

from blake3 import blake3

from tests.support.storing import (
    chunks,
    gc,
    new_store,
    read,
    write,
)
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.format import pack as format_pack
from vmckpt.store.repository import Store


def test_the_client_keeps_what_packs_hold(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s", tmp_path / "cache")
    for number in range(12):
        write(store, f"s{number}", chunks(*range(number * 5, number * 5 + 9)))

    class Counting(LocalFolder):
        asked: list[str] = []  # noqa: RUF012

        def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
            self.asked.append(key)
            return super().get(key, offset, length)

    again = Store.open(Counting(tmp_path / "s"), cache=tmp_path / "cache")
    again.catalog.load()
    Counting.asked.clear()
    assert len(again.catalog.load().index.packs()) == len(list(store.backend.keys("packs/")))
    assert Counting.asked == []

    # A cache that was damaged is made anew.
    for path in (tmp_path / "cache" / store.id).glob("*.index"):
        path.write_bytes(path.read_bytes()[:-40] + bytes(40))
    for number in range(12):
        assert read(again, f"s{number}") == chunks(*range(number * 5, number * 5 + 9))
    assert Counting.asked != []


def test_a_newer_pack_is_refused_by_name_and_never_removed(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    data = bytearray(format_pack.encode([(b"n" * 32, b"box", 3)], bytes(16)))
    data[8] = data[-16] = 3  # its version, at both ends
    newer = blake3(data).hexdigest()
    store.backend.put(format_pack.key_of(newer), bytes(data))

    assert "version 3; this vmckpt supports versions up to 2" in str(
        store.catalog.load().unreadable[newer]
    )
    assert gc(store).unreadable == (newer,)
    assert any(store.backend.keys(format_pack.key_of(newer)))
