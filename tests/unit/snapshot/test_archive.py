"""vmckpt snapshot export and import."""

import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from blake3 import blake3

from tests.fixtures.make_store_v1 import secret
from tests.support.stocking import Stock, id_of, page, stocked
from vmckpt.errors import StoreDamaged, StoreError
from vmckpt.snapshot import archive as snapshot_archive
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.format import pack as format_pack
from vmckpt.store.keys.keyring import OwnKey
from vmckpt.store.repository import Store

STRANGER = OwnKey(secret("a stranger"))
AGAIN = "export the snapshot again"


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    return stocked(tmp_path, monkeypatch, capsys)


def ids(stock: Stock, name: str = "near") -> set[str]:
    return {one.id for one in stock.store(name).manifests()}


def test_an_export_is_a_store_and_comes_back_whole(stock: Stock) -> None:
    key = str(stock.encrypt())
    id_ = stock.put("one", list(range(40)))
    stock.put("other", [99])

    told = json.loads(stock("export", "one", "file", "--json")[1])
    assert (told["id"], told["chunks"]) == (id_, 12)
    assert told["bytes"] == (stock.folder / "file").stat().st_size
    assert (stock.folder / "file").stat().st_mode & 0o777 == 0o600
    code, _, wrong = stock("export", "one", "file")
    assert (code, "already exists" in wrong) == (2, True)
    code, told_, _ = stock("import", "file", "--store", "far")
    assert (code, f"{id_} one: stored in far; 12 of 12 chunks new" in told_) == (0, True)
    assert stock("verify", "--deep", "--identity", key, "--store", "far")[0] == 0
    assert "already in near" in stock("import", "file")[1]
    (stock.folder / "unpacked").mkdir()
    subprocess.run(["tar", "-xf", "file", "-C", "unpacked"], cwd=stock.folder, check=True)
    unpacked = Store.open(LocalFolder(stock.folder / "unpacked"))
    assert [one.id for one in unpacked.manifests()] == [id_]
    (stock.folder / "hosts.yaml").write_text(
        f"hosts: {{a: {{uri: 'test:///default'}}}}\nstores: {{near: {stock.folder}/unpacked}}\n"
    )
    assert stock("verify", "--deep", "--identity", key)[0] == 0


def test_an_import_needs_a_trusted_writer(stock: Stock) -> None:
    id_ = stock.put("one", [1], signer=STRANGER)
    assert stock("export", "one", "file")[0] == 0

    code, _, wrong = stock("import", "file", "--store", "far")
    assert (code, "keys trust NAME" in wrong, ids(stock, "far")) == (43, True, set())
    assert id_ in ids(stock)


def test_one_flipped_bit_anywhere_in_an_export_is_refused(stock: Stock) -> None:
    stock.encrypt()
    stock.put("one", [1, 2])
    snapshot_archive.export(stock.store(), id_of("one"), stock.folder / "file", pack_size=20_000)
    file, far = stock.folder / "file", stock.store("far")
    data = file.read_bytes()
    trusted = stock.ring.trusted()
    headings = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    places = {
        *range(0, len(data), 997),
        *(at + step for at in headings for step in range(0, 512, 31)),
    }

    for at in sorted(places):
        file.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(StoreError) as caught:
            snapshot_archive.import_(far, file, trusted)
        assert "\n" not in str(caught.value)
        if isinstance(caught.value, StoreDamaged):
            assert (caught.value.hint, str(file) in str(caught.value)) == (AGAIN, True)
    cut = r"archive is truncated|the archive lacks \d+ of the snapshot's \d+ chunks?"
    for end in (0, 100, 512, 5000, len(data) - 1024, len(data) - 512, len(data) - 1):
        file.write_bytes(data[:end])
        with pytest.raises(StoreError, match=cut):
            snapshot_archive.import_(far, file, trusted)
    file.write_bytes(data + b"\0")
    with pytest.raises(StoreError, match="trailing data"):
        snapshot_archive.import_(far, file, trusted)
    assert ids(stock, "far") == set()
    file.write_bytes(data)
    assert not snapshot_archive.import_(far, file, trusted).already


def test_a_chunk_under_a_wrong_name_does_not_get_in_where_that_can_be_seen(stock: Stock) -> None:
    stock.put("one", [1])
    good, lie = page(1), page(2)
    sealing = stock.ring.sealing()
    name = sealing.name_of(sealing.digest_of(good))
    snapshot_archive.export(stock.store(), id_of("one"), stock.folder / "file")
    rows = _rows(stock.folder / "file")
    rows[name] = (sealing.seal(lie, sealing.digest_of(lie)), len(lie))
    _replace_pack(stock.folder / "file", rows)

    code, _, wrong = stock("import", "file", "--store", "far")
    assert (code, "does not match its digest" in wrong, ids(stock, "far")) == (41, True, set())
    assert AGAIN in wrong


def _rows(file: Path) -> dict[bytes, tuple[bytes, int]]:
    with tarfile.open(file) as archive:
        member = next(one for one in archive if one.name.startswith("packs/"))
        told = archive.extractfile(member)
        assert told is not None
        data = told.read()
    found = format_pack.parse(member.name.rpartition("/")[2], data).rows.tolist()
    return {name: (data[at : at + length], plain) for name, at, length, plain, _ in found}


def _replace_pack(file: Path, rows: dict[bytes, tuple[bytes, int]]) -> None:
    with tarfile.open(file) as archive:
        kept = [
            (one.name, archive.extractfile(one).read())  # type: ignore[union-attr]
            for one in archive
            if not one.name.startswith("packs/")
        ]
    pack = format_pack.encode(
        [(name, box, plain) for name, (box, plain) in rows.items()], bytes(16)
    )
    with file.open("wb") as out:
        archive_ = snapshot_archive._Archive(out, 0)
        for name, body in [*kept, (format_pack.key_of(blake3(pack).hexdigest()), pack)]:
            archive_.add(name, body)
        archive_.end()


def test_what_is_no_export_is_refused(stock: Stock) -> None:
    (stock.folder / "file").write_bytes(os.urandom(4096))
    code, _, wrong = stock("import", "file")
    assert (code, "not an exported snapshot" in wrong) == (41, True)
    assert stock("import", "nothing")[0] == 45
    assert stock("import", ".")[0] == 40
    stock.put("one", [1])
    assert stock("export", "one", "no/such/folder")[0] == 45
