"""Each cell of docs/locking.md's table of stores, tried."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import store_locking
from tests.support.stocking import Stock, id_of, page, stocked
from tests.support.store_locking import CELLS, Ask, Cell, Work
from vmckpt.snapshot import catalog
from vmckpt.store import gc, locks
from vmckpt.store.format import manifest
from vmckpt.store.locks import Lock

PAGES = list(range(16))


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    """`one` is what is deleted and read, `two` and `three` are beside it."""
    stock = stocked(tmp_path, monkeypatch, capsys)
    stock.encrypt()
    stock.put("one", PAGES)
    stock.put("two", [*PAGES[:8], 90])
    stock.put("three", [80], disk=9, tags={"schedule": "nightly"})
    stock.put("four", [81], disk=9, tags={"schedule": "nightly"})
    stock.put("five", [70], in_="far", disk=7)
    assert stock("export", "five", "file", "--store", "far")[0] == 0
    return stock


@contextmanager
def writing(stock: Stock) -> Iterator[None]:
    """It counts on chunks of `one`, and publishes after the others are done."""
    store = stock.store()
    with store.writer(stock.ring.sealing()) as writer:
        digest = writer.add(b"".join(page(number) for number in PAGES[:4])).result()
        yield
        assert writer.finish().chunks_known == 1
        with store.reader(stock.ring.sealing()) as reader:
            assert reader.read(digest)[:4096] == page(0)


@contextmanager
def deleting(stock: Stock) -> Iterator[None]:
    lock = Lock(stock.store().backend, locks.LockPurpose.DELETE, about=id_of("one"))
    assert lock.take()
    yield
    lock.release()


@contextmanager
def collecting(stock: Stock) -> Iterator[None]:
    lock = gc.take_lock(stock.store().backend, locks.LIFE)
    yield
    lock.release()


@contextmanager
def reading(stock: Stock) -> Iterator[None]:
    store = stock.store()
    trusted = stock.ring.trusted()
    looked = catalog.inspect(store, id_of("one"), trusted)
    key = stock.identity("alice")
    from vmckpt.store.keys import identity as keys_identity  # noqa: PLC0415

    identity = keys_identity.load(key)
    private, sealing = catalog.opened(store, looked, lambda: identity, trusted)
    with store.reader(sealing) as reader:
        reader.read(private.chunks[0])
        yield
        for digest in private.chunks:
            reader.read(digest)


UNDER: dict[Work, Callable[[Stock], object]] = {
    Work.WRITE: writing,
    Work.DELETE: deleting,
    Work.GC: collecting,
    Work.REPAIR: collecting,
    Work.READ: reading,
}


def asked(stock: Stock, ask: Ask) -> tuple[int, str, str]:
    key = ("--identity", str(stock.identity("alice")))
    commands: dict[Ask, tuple[str, ...]] = {
        Ask.COPY: ("copy", "five", "--store", "far", "--to", "near"),
        Ask.IMPORT: ("import", "file"),
        Ask.VERIFY: ("verify", "--deep", *key),
        Ask.EXPORT: ("export", "one", "other file"),
        Ask.PIN: ("pin", "one"),
        Ask.DELETE_OTHER: ("delete", "two", "--yes"),
        Ask.DELETE: ("delete", "one", "--yes"),
        Ask.PRUNE: ("prune", "--keep-last", "1", "--yes"),
        Ask.ROTATE: ("keys", "rotate", "--yes", *key),
        Ask.GC: ("gc", "--grace", "1h"),
        Ask.REPAIR: ("verify", "--repair"),
    }
    if ask is Ask.CREATE:
        stock.put("new", [*PAGES, 95])
        return 0, "", ""
    return stock(*commands[ask])


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.work.name}-{cell.ask.name}")
def test_a_cell_is_as_the_table_says(stock: Stock, cell: Cell) -> None:
    with UNDER[cell.work](stock):  # type: ignore[attr-defined]
        code, _, wrong = asked(stock, cell.ask)
    assert (code, cell.says in wrong) == (cell.code, True), wrong
    if code:
        assert len(wrong.splitlines()) == 1, wrong
    store = stock.store()
    assert list(store.backend.keys("locks/")) == []
    for one in store.manifests():
        manifest.decode(store.manifest(one.id), one.id, stock.ring.trusted())
    assert stock("verify", "--deep", "--identity", str(stock.identity("alice")))[0] == 0


def test_the_document_has_the_table_that_is_tried() -> None:
    assert store_locking.table() in store_locking.DOCUMENT.read_text()
