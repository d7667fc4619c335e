import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.errors import KeyRefused
from vmckpt.store.format.sealing import Encrypted, Plain
from vmckpt.store.keys import identity, key_files
from vmckpt.store.keys.identity import public_of
from vmckpt.store.keys.key_files import KeyKind, key_text, parse_key
from vmckpt.store.keys.keyring import Keyring

CHEAP = 10


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path / "state" / "keys")


def admin() -> str:
    return key_text(KeyKind.ADMIN, public_of(X25519PrivateKey.generate()))


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

    with pytest.raises(KeyRefused, match=r"alice is the only administrator.*add another key first"):
        ring.remove_admin("alice")


def test_a_salt_without_an_administrator_does_not_mean_plain(ring: Keyring, tmp_path: Path) -> None:
    ring.add_admin("alice", admin())
    other = Keyring(tmp_path / "other")
    other.import_salt(ring.export_salt())

    with pytest.raises(KeyRefused, match="nobody could read a snapshot; vmckpt snapshot keys add"):
        other.sealing()
    other.add_admin("alice", ring.admins()[0].text)
    assert other.sealing().domain == ring.sealing().domain


def test_a_host_stays_in_its_domain(ring: Keyring, tmp_path: Path) -> None:
    ring.add_admin("alice", admin())
    other = Keyring(tmp_path / "other")
    other.add_admin("alice", admin())
    ring.import_salt(ring.export_salt())

    with pytest.raises(KeyRefused, match="belongs to another domain already"):
        ring.import_salt(other.export_salt())
    with pytest.raises(KeyRefused, match="there is no domain yet"):
        Keyring(tmp_path / "third").export_salt()


@pytest.mark.parametrize("name", ["", ".hidden", "../salt", "a/b", "a b", "x" * 65, "a\n"])
def test_a_name_that_is_no_name_is_refused(ring: Keyring, name: str) -> None:
    with pytest.raises(KeyRefused, match="cannot name a key"):
        ring.add_admin(name, admin())
    with pytest.raises(KeyRefused, match="no key named"):
        ring.remove_admin(name)


def test_a_name_has_one_key_and_a_key_one_name(ring: Keyring) -> None:
    key = admin()
    ring.add_admin("alice", key)

    with pytest.raises(KeyRefused, match="alice has another key"):
        ring.add_admin("alice", admin())
    with pytest.raises(KeyRefused, match="this key is there already, as alice"):
        ring.add_admin("bob", key)


@pytest.mark.parametrize("low", [bytes(32), bytes([1]) + bytes(31)])
def test_a_key_that_keeps_nothing_secret_is_refused(ring: Keyring, low: bytes) -> None:
    with pytest.raises(KeyRefused, match="nothing can be encrypted for this key"):
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


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_secret_that_others_can_read_is_refused(ring: Keyring, mode: int) -> None:
    ring.add_admin("alice", admin())
    (ring.folder / "salt").chmod(mode)

    with pytest.raises(KeyRefused, match=r"others can read this key \(mode 6.*; chmod 600 "):
        ring.sealing()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda text: text[:-3], id="cut off"),
        pytest.param(lambda text: "", id="empty"),
        pytest.param(lambda text: text[:20] + chr(ord(text[20]) ^ 1) + text[21:], id="slip"),
        pytest.param(lambda text: text + text, id="twice"),
        pytest.param(lambda text: "\x00" * 50, id="zeros"),
    ],
)  # fmt: skip
def test_a_damaged_secret_is_refused_and_never_made_anew(ring: Keyring, damage: object) -> None:
    assert callable(damage)
    ring.add_admin("alice", admin())
    path = ring.folder / "salt"
    text = path.read_text()
    path.write_text(damage(text))

    with pytest.raises(KeyRefused) as refused:
        ring.sealing()
    assert str(path) in str(refused.value)
    assert text.partition(":")[2][:20].strip() not in str(refused.value)  # it is a secret
    assert path.read_text() == damage(text)


@given(st.binary(min_size=32, max_size=32), st.sampled_from([*KeyKind]), st.data())
def test_every_slip_in_a_key_is_seen(key: bytes, kind: KeyKind, data: st.DataObject) -> None:
    text = key_text(kind, key)
    assert parse_key(f" {text}\n", kind) == key
    at = data.draw(st.integers(0, len(text) - 1))
    letter = data.draw(st.characters().filter(lambda one: one != text[at]))
    wrong = text[:at] + letter + text[at + 1 :]

    if wrong.strip() != text:
        with pytest.raises(KeyRefused):
            parse_key(wrong, kind)


def test_a_key_of_another_kind_is_named(ring: Keyring) -> None:
    with pytest.raises(KeyRefused, match="this is a writer's public key, not an administrator's"):
        ring.add_admin("alice", ring.writer().text)


def test_an_identity_is_made_once_and_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "alice"
    public = identity.create(path)

    assert public_of(identity.load(path)) == public
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key_text(KeyKind.ADMIN, public) in path.read_text()
    with pytest.raises(KeyRefused, match="may be the only key to some snapshots"):
        identity.create(path)


def test_an_identity_with_a_passphrase_opens_with_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "alice"
    public = identity.create(path, "secret words é", cost=CHEAP)

    assert public_of(identity.load(path, lambda: "secret words é")) == public
    with pytest.raises(KeyRefused, match="wrong passphrase"):
        identity.load(path, lambda: "secret words e")
    with pytest.raises(KeyRefused, match="has a passphrase"):
        identity.load(path)
    with pytest.raises(KeyRefused, match="an empty passphrase protects nothing"):
        identity.create(tmp_path / "bob", "", cost=CHEAP)
    assert not (tmp_path / "bob").exists()


@pytest.mark.parametrize("cost", [9, 19, 63])
def test_a_passphrase_that_would_take_all_memory_is_not_tried(cost: int) -> None:
    text = key_text(KeyKind.LOCKED, bytes([cost]) + bytes(64))

    with pytest.raises(KeyRefused, match=rf"would cost 2\^{cost} rounds"):
        identity.parse(text, lambda: pytest.fail("asked"), where="file")


@pytest.mark.parametrize("text", ["", "# nothing\n", "a\nb\n", "vmckpt-admin:\n", "\x00"])
def test_what_is_no_identity_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "alice"
    path.write_text(text)
    path.chmod(0o600)

    with pytest.raises(KeyRefused, match=str(path)):
        identity.load(path)


def test_files_that_cannot_be_keys_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "raw").write_bytes(b"\xff\xfe" * 3000)
    (tmp_path / "raw").chmod(0o600)
    (tmp_path / "folder").mkdir(mode=0o700)

    for name in ("pipe", "raw", "folder", "missing"):
        with pytest.raises(KeyRefused, match=name):
            identity.load(tmp_path / name)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(KeyRefused, match="cannot be written: No space left on device"):
        key_files.write(tmp_path / "key", "text")

    assert list(tmp_path.iterdir()) == []
