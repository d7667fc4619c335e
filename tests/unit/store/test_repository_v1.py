"""What was written in version 1 is read for ever: see tests/fixtures/make_store_v1.py."""

import shutil
from pathlib import Path

import pytest
import zstandard

from tests.fixtures import make_store_v1 as made
from tests.fixtures.make_store_v1 import CHUNKS, DATA_KEY, FACTS, FOLDER, ID, PASSPHRASE, PUBLIC
from vmckpt.store.format.manifest import decode, references
from vmckpt.store.format.sealing import Encrypted, Plain, Sealing
from vmckpt.store.keys import identity as keys_identity
from vmckpt.store.keys import wrapped_keys
from vmckpt.store.keys.keyring import Keyring


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    """The kept keys, with the modes that a repository does not keep."""
    shutil.copytree(FOLDER / "keys", tmp_path / "keys")
    shutil.copytree(FOLDER / "identities", tmp_path / "identities")
    for path in tmp_path.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return Keyring(tmp_path / "keys")


def sealing(name: str) -> Sealing:
    return Plain() if name == "plain" else Encrypted(made.SALT)


@pytest.mark.parametrize("name", ["plain", "encrypted"])
def test_manifest_and_boxes_are_read(name: str, ring: Keyring) -> None:
    data = (FOLDER / name / "snapshots" / ID).read_bytes()
    told = decode(data, ID, ring.trusted())
    kept = told.private(DATA_KEY if name == "encrypted" else None)
    boxes = [(FOLDER / name / "boxes" / str(number)).read_bytes() for number in range(len(CHUNKS))]

    assert (told.public.name, told.public.made_at) == (PUBLIC.name, PUBLIC.made_at)
    assert told.public.domain == sealing(name).domain
    assert kept.facts == FACTS
    assert kept.files == {"nvram": b"\x00\x01nvram", "tpm/tpm2-00.permall": b"tpm"}
    assert [(one.name, one.size, one.map.tolist()) for one in kept.regions] == [
        (one.name, one.size, one.map.tolist()) for one in made.private(sealing(name)).regions
    ]
    assert set(references(data, ID)) == {box[:32] for box in boxes}
    for digest, box, chunk in zip(kept.chunks, boxes, CHUNKS, strict=True):
        assert sealing(name).name_of(digest) == box[:32]
        assert sealing(name).unseal(box[32:], digest) == chunk


@pytest.mark.parametrize("name", ["alice", "bob"])
def test_each_administrator_opens_the_wraps(name: str, ring: Keyring) -> None:
    identity = keys_identity.load(ring.folder.parent / "identities" / name, lambda: PASSPHRASE)
    data = (FOLDER / "encrypted" / "wraps" / ID).read_bytes()

    assert wrapped_keys.unwrap(data, ID, identity) == DATA_KEY
    assert keys_identity.public_of(identity) in {one.key for one in ring.admins()}


def test_the_keyring_is_read(ring: Keyring) -> None:
    assert ring.salt() == made.SALT
    assert ring.writer().key == made.WRITER
    assert [one.name for one in ring.admins()] == ["alice", "bob"]
    assert ring.trusted() == {made.WRITER}
    assert ring.encrypts


def test_the_script_makes_what_is_kept() -> None:
    kept = {
        str(path.relative_to(FOLDER)): path.read_bytes()
        for path in FOLDER.rglob("*")
        if path.is_file()
    }
    if kept["made-with"] != repr(zstandard.ZSTD_VERSION).encode() + b"\n":
        pytest.skip("another zstd may compress in another way; reading is what counts")

    assert made.files() == kept
