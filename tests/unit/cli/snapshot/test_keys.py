"""vmckpt snapshot keys: who can read snapshots, and whose are believed."""

import json
from pathlib import Path

import pytest

from tests.fixtures.make_store_v1 import BOB, secret
from tests.support.stocking import ALICE_KEY, Stock, flip, id_of, stocked
from vmckpt.store.keys import wrapped_keys
from vmckpt.store.keys.identity import public_of
from vmckpt.store.keys.key_files import KeyKind, fingerprint, key_text
from vmckpt.store.keys.keyring import OwnKey

BOB_KEY = key_text(KeyKind.ADMIN, public_of(BOB))
WRITER_KEY = key_text(KeyKind.WRITER, OwnKey(secret("another")).public)


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    return stocked(tmp_path, monkeypatch, capsys)


def recipients(stock: Stock, name: str, in_: str = "near") -> set[str]:
    id_ = id_of(name)
    return set(wrapped_keys.recipients(stock.store(in_).wraps(id_) or b"", id_))


def test_encryption_is_on_from_the_first_key(stock: Stock) -> None:
    told = stock("keys", "list")[1]
    assert "are not encrypted; to change this, run vmckpt snapshot keys add" in told
    assert not (stock.folder / "state" / "keys").exists()
    stock.put("open", [1])

    code, told, said = stock("keys", "add", "alice", ALICE_KEY)
    assert (code, "are encrypted for alice" in told, "encryption is on" in said) == (0, True, True)
    stock.put("closed", [1])
    shown = json.loads(stock("keys", "list", "--json")[1])
    assert (shown["encrypts"], shown["domain"]) == (True, stock.ring.domain())
    assert shown["writer"]["key"] == stock.ring.writer().text
    assert [one["name"] for one in shown["admins"]] == ["alice"]
    assert json.loads(stock("show", "closed", "--json")[1])["encrypted"]
    assert not json.loads(stock("show", "open", "--json")[1])["encrypted"]
    assert ALICE_KEY in stock("keys", "list")[1]


def test_keys_are_added_and_removed_but_for_the_last(stock: Stock) -> None:
    assert stock("keys", "add", "alice", ALICE_KEY)[0] == 0
    assert stock("keys", "add", "bob", BOB_KEY, "--json")[0] == 0
    assert stock("keys", "remove", "alice")[0] == 0
    code, _, wrong = stock("keys", "remove", "bob")
    assert (code, "cannot remove bob, the only administrator" in wrong) == (43, True)
    assert stock("keys", "add", "x", "nonsense")[0] == 43
    assert stock("keys", "add", "x", WRITER_KEY)[0] == 43
    assert stock("keys", "trust", "other", WRITER_KEY)[0] == 0
    assert "is trusted" in stock("keys", "list")[1]
    assert stock("keys", "distrust", "other", "--json")[0] == 0
    assert stock("keys", "distrust", "other")[0] == 43


def test_a_new_identity_opens_what_is_made_for_it(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, wrong = stock("keys", "new", "key")
    assert (code, "add --no-passphrase" in wrong) == (43, True)
    told = json.loads(stock("keys", "new", "key", "--no-passphrase", "--json")[1])
    assert (stock.folder / "key").stat().st_mode & 0o777 == 0o600
    assert stock("keys", "add", "me", told["key"])[0] == 0
    stock.put("one", [1])
    monkeypatch.setenv("VMCKPT_IDENTITY", "key")
    assert stock("verify", "--deep")[0] == 0
    code, _, wrong = stock("keys", "new", "key", "--no-passphrase")
    assert (code, "may be the only key to some snapshots" in wrong) == (43, True)


def test_a_rotation_makes_all_snapshots_open_for_the_keys_there_are(stock: Stock) -> None:
    stock.put("open", [1])
    alice = str(stock.encrypt())
    stock.put("one", [1])
    stock.put("two", [2])
    assert stock("copy", "one", "--to", "far")[0] == 0
    assert stock("keys", "add", "bob", BOB_KEY)[0] == 0
    both = {one.fingerprint for one in stock.ring.admins()}

    code, told, _ = stock("keys", "rotate", "--identity", alice, "--dry-run")
    planned = "2 snapshots would be encrypted for alice, bob; 1 not encrypted"
    assert (code, planned in told) == (0, True)
    assert recipients(stock, "one") != both
    code, _, wrong = stock("keys", "rotate", "--identity", alice)
    assert (code, "data keys of all snapshots for alice, bob only: stdin" in wrong) == (2, True)
    told = json.loads(stock("keys", "rotate", "--identity", alice, "--yes", "--json")[1])
    assert [len(one["rewrapped"]) for one in told["stores"]] == [2, 1]
    for name, in_ in (("one", "near"), ("two", "near"), ("one", "far")):
        assert recipients(stock, name, in_) == both

    code, told, _ = stock("keys", "rotate", "--identity", alice, "--drop", "alice", "--yes")
    assert (code, "2 snapshots encrypted for bob" in told) == (0, True)
    assert [one.name for one in stock.ring.admins()] == ["bob"]
    assert recipients(stock, "two") == {fingerprint(public_of(BOB))}
    code, told, wrong = stock("keys", "rotate", "--identity", alice, "--yes")
    assert (code, "is not encrypted for this identity" in told) == (43, True)
    assert "3 snapshots left unchanged" in wrong


def test_a_rotation_needs_an_identity_and_leaves_somebody(stock: Stock) -> None:
    alice = str(stock.encrypt())
    assert "add --identity" in stock("keys", "rotate")[2]
    code, _, wrong = stock("keys", "rotate", "--identity", alice, "--drop", "alice", "--yes")
    assert code == 43
    assert "no administrator's key would be left to read the snapshots" in wrong
    code, _, wrong = stock("keys", "rotate", "--identity", alice, "--drop", "eve", "--yes")
    assert (code, "if the key is already removed, omit --drop" in wrong) == (43, True)
    assert stock("keys", "rotate", "--identity", "none", "--yes")[0] == 43


def test_a_rotation_leaves_what_is_damaged_as_it_is_and_says_so(stock: Stock) -> None:
    alice = str(stock.encrypt())
    one, two = stock.put("one", [1]), stock.put("two", [2])
    flip(stock.folder / "near" / "snapshots" / one, 300)
    stock.put("strange", [3], signer=OwnKey(secret("another")))
    before = stock.store().wraps(one)

    code, told, wrong = stock("keys", "rotate", "--identity", alice, "--yes")
    assert (code, f"unchanged: {one}: its checksum is wrong" in told) == (41, True)
    assert "1 damaged snapshot left unchanged" in wrong
    assert "a writer that is not trusted here" in told
    assert stock.store().wraps(one) == before
    assert "1 snapshot encrypted for alice" in told
    assert two in {one.id for one in stock.store().manifests()}
