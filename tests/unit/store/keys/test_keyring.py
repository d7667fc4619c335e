import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tests.support.keyrings import admin, ring
from vmckpt.errors import KeyRefused
from vmckpt.store.format.sealing import Encrypted, Plain
from vmckpt.store.keys.key_files import KeyKind, key_text, parse_key
from vmckpt.store.keys.keyring import Keyring

__all__ = ["ring"]


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*") if p.is_file()}


def test_without_an_administrator_nothing_is_encrypted(ring: Keyring) -> None:
    assert not ring.encrypts
    assert isinstance(ring.sealing(), Plain)
    assert ring.domain() is None
    assert not ring.folder.exists()


def test_as_soon_as_there_is_an_administrator_everything_is(ring: Keyring) -> None:
    ring.add_admin("alice", admin())

    assert ring.encrypts
    assert isinstance(ring.sealing(), Encrypted)
    assert ring.sealing().domain == ring.domain() == Keyring(ring.folder).sealing().domain


def test_all_files_are_for_their_owner_alone(ring: Keyring) -> None:
    ring.add_admin("alice", admin())
    ring.trust("beta", ring.writer().text)

    assert modes(ring.folder) == {0o600}
    assert stat.S_IMODE(ring.folder.stat().st_mode) == 0o700
    assert not list(ring.folder.rglob("*.tmp"))


def test_administrators_are_added_listed_and_removed(ring: Keyring) -> None:
    first, second = admin(), admin()
    ring.add_admin("bob", second)
    ring.add_admin("alice", first)
    ring.add_admin("alice", first)  # again: nothing to do

    assert [(one.name, one.text) for one in ring.admins()] == [("alice", first), ("bob", second)]
    assert len({one.fingerprint for one in ring.admins()}) == 2
    ring.remove_admin("bob")
    assert [one.name for one in ring.admins()] == ["alice"]


def test_the_last_administrator_stays(ring: Keyring) -> None:
    ring.add_admin("alice", admin())

    with pytest.raises(
        KeyRefused, match=r"alice, the only administrator.*add another administrator's key first"
    ):
        ring.remove_admin("alice")


def test_a_salt_without_an_administrator_does_not_mean_plain(ring: Keyring, tmp_path: Path) -> None:
    ring.add_admin("alice", admin())
    other = Keyring(tmp_path / "other")
    other.import_salt(ring.export_salt())

    with pytest.raises(
        KeyRefused, match="no key could decrypt new snapshots; run vmckpt snapshot keys add"
    ):
        other.sealing()
    other.add_admin("alice", ring.admins()[0].text)
    assert other.sealing().domain == ring.sealing().domain


def test_a_host_stays_in_its_domain(ring: Keyring, tmp_path: Path) -> None:
    ring.add_admin("alice", admin())
    other = Keyring(tmp_path / "other")
    other.add_admin("alice", admin())
    ring.import_salt(ring.export_salt())

    with pytest.raises(KeyRefused, match="already belongs to another domain"):
        ring.import_salt(other.export_salt())
    with pytest.raises(KeyRefused, match="has no domain yet"):
        Keyring(tmp_path / "third").export_salt()


@pytest.mark.parametrize("name", ["", ".hidden", "../salt", "a/b", "a b", "x" * 65, "a\n"])
def test_a_name_that_is_no_name_is_refused(ring: Keyring, name: str) -> None:
    with pytest.raises(KeyRefused, match="is not a valid key name"):
        ring.add_admin(name, admin())
    with pytest.raises(KeyRefused, match="no key named"):
        ring.remove_admin(name)


def test_a_name_has_one_key_and_a_key_one_name(ring: Keyring) -> None:
    key = admin()
    ring.add_admin("alice", key)

    with pytest.raises(KeyRefused, match="there is already a different key named alice"):
        ring.add_admin("alice", admin())
    with pytest.raises(KeyRefused, match="this key already exists as alice"):
        ring.add_admin("bob", key)


@pytest.mark.parametrize("low", [bytes(32), bytes([1]) + bytes(31)])
def test_a_key_that_keeps_nothing_secret_is_refused(ring: Keyring, low: bytes) -> None:
    with pytest.raises(KeyRefused, match="this key is not secure for encryption"):
        ring.add_admin("eve", key_text(KeyKind.ADMIN, low))
    assert ring.admins() == ()


def test_writers_are_trusted_by_name_and_this_one_always(ring: Keyring, tmp_path: Path) -> None:
    other = Keyring(tmp_path / "other")
    assert ring.trusted() == frozenset()
    ring.trust("beta", other.writer().text)

    assert ring.trusted() == {other.writer().key}
    mine = ring.writer().key
    assert ring.trusted() == {mine, other.writer().key}
    ring.distrust("beta")
    assert ring.trusted() == {ring.writer().key}


def test_who_only_reads_gets_no_keys_of_its_own(ring: Keyring) -> None:
    assert ring.trusted() == frozenset()
    assert not ring.folder.exists()


def test_what_one_signs_is_checked_with_the_key_it_shows(ring: Keyring) -> None:
    signature = ring.signing().sign(b"words")

    Ed25519PublicKey.from_public_bytes(ring.writer().key).verify(signature, b"words")
    assert parse_key(ring.writer().text, KeyKind.WRITER) == ring.writer().key


def test_processes_that_begin_at_once_end_with_the_same_keys(ring: Keyring) -> None:
    barrier = threading.Barrier(8)

    def begin(_: int) -> tuple[bytes, str]:
        barrier.wait(10)
        mine = Keyring(ring.folder)
        mine.add_admin("alice", key)
        return mine.writer().key, mine.sealing().domain

    key = admin()
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(begin, range(8)))) == 1
    assert not list(ring.folder.rglob("*.tmp"))
