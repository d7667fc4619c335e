"""A store with a foreign pack is read for ever: see tests/fixtures/make_store_v2.py."""

import shutil
from pathlib import Path

import zstandard

from tests.fixtures import make_store_v2 as made
from tests.fixtures.make_store_v1 import CHUNKS, DATA_KEY, ID, SALT, WRITER
from vmckpt.snapshot.catalog import references
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.format import manifest
from vmckpt.store.format.sealing import Encrypted
from vmckpt.store.repository import Store
from vmckpt.store.verify import verify


def test_the_store_is_whole_and_its_chunks_are_read(tmp_path: Path) -> None:
    shutil.copytree(made.FOLDER, tmp_path / "s")
    store = Store.open(LocalFolder(tmp_path / "s"))
    found = manifest.decode(store.manifest(ID), ID, {WRITER})

    assert [str(one) for one in verify(store, references).wrong] == []
    infos = store.catalog.load().index.packs().values()
    assert sorted((one.foreign, one.generation) for one in infos) == [(False, 1), (True, 0)]
    with store.reader(Encrypted(SALT)) as reader:
        assert tuple(map(reader.read, found.private(DATA_KEY).chunks)) == CHUNKS


def test_nobody_counts_on_what_is_foreign(tmp_path: Path) -> None:
    shutil.copytree(made.FOLDER, tmp_path / "s")
    store = Store.open(LocalFolder(tmp_path / "s"))
    with store.writer(Encrypted(SALT)) as writer:
        digests = [writer.add(chunk).result() for chunk in CHUNKS]
        written = writer.finish()
    assert (len(digests), written.chunks_new, written.chunks_known) == (4, 2, 2)


def test_the_script_makes_what_is_kept() -> None:
    kept = {
        str(path.relative_to(made.FOLDER)): path.read_bytes()
        for path in made.FOLDER.rglob("*")
        if path.is_file()
    }
    told = repr(zstandard.ZSTD_VERSION).encode() + b"\n"
    # Another zstd may compress in another way; reading is what counts.
    assert kept["made-with"] != told or made.files() == kept
