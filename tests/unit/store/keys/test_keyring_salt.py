"""A second controller that writes into the same domain."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.stocking import ALICE_KEY, Stock, stocked


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    stock = stocked(tmp_path, monkeypatch, capsys)
    stock.encrypt()
    monkeypatch.setattr("vmckpt.store.keys.keyring.write.__kwdefaults__", {"cost": 10})
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    return stock


def phrase(stock: Stock, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    path = stock.folder / "phrase"
    path.write_text(words + "\n")
    path.chmod(0o600)
    monkeypatch.setenv("VMCKPT_PASSPHRASE_FILE", str(path))


def test_two_controllers_share_a_domain_and_store_once(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stock.put("one", list(range(16)))
    packs = stock.packs()
    phrase(stock, monkeypatch, "correct horse")
    told = json.loads(stock("keys", "export-salt", "salt.key", "--json")[1])
    assert told["passphrase"] is True
    text = (stock.folder / "salt.key").read_text()
    assert "vmckpt-salt-locked:" in text
    assert stock.ring.export_salt() not in text
    assert (stock.folder / "salt.key").stat().st_mode & 0o777 == 0o600
    writer = json.loads(stock("keys", "list", "--json")[1])["writer"]["key"]

    (stock.folder / "state").rename(stock.folder / "first state")
    code, said, _ = stock("keys", "import-salt", "salt.key", "--json")
    assert (code, json.loads(said)) == (0, {"domain": told["domain"], "encrypts": False})
    # Nothing is written in the clear for want of a key.
    code, _, wrong = stock("keys", "import-salt", "salt.key")
    assert (code, "keys add NAME KEY" in wrong) == (0, True)
    assert stock("keys", "add", "alice", ALICE_KEY)[0] == 0
    stock.put("two", list(range(16)))
    assert len(stock.packs()) == len(packs), "the same chunks were stored twice"
    assert stock("verify", first)[0] == 43
    assert stock("keys", "trust", "first", writer)[0] == 0
    assert stock("verify", "--deep", "--identity", str(stock.identity("alice")))[0] == 0


def test_what_goes_wrong_is_one_line_and_leaves_the_keys_as_they_are(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, wrong = stock("keys", "export-salt", "salt.key")
    assert (code, "has no domain yet" in wrong) == (43, True) or "--no-passphrase" in wrong
    stock.put("one", [1])
    phrase(stock, monkeypatch, "correct horse")
    assert stock("keys", "export-salt", "salt.key")[0] == 0
    own = stock.ring.export_salt()
    assert stock("keys", "import-salt", "salt.key")[0] == 0, "it is its own"
    cases = [("keys", "export-salt", "salt.key"), ("keys", "import-salt", "nothing")]
    (stock.folder / "state").rename(stock.folder / "first state")
    phrase(stock, monkeypatch, "wrong horse")
    cases.append(("keys", "import-salt", "salt.key"))
    (stock.folder / "alice.key").chmod(0o600)
    cases.append(("keys", "import-salt", "alice.key"))
    for case in cases:
        code, _, wrong = stock(*case)
        assert (code, len(wrong.splitlines()), own in wrong) == (43, 1, False), wrong
    assert stock.ring.salt() is None
    stock.encrypt()
    stock.put("two", [1])
    phrase(stock, monkeypatch, "correct horse")
    code, _, wrong = stock("keys", "import-salt", "salt.key")
    assert (code, "already belongs to another domain" in wrong) == (43, True)


def test_a_file_without_a_passphrase_is_asked_for_by_name(stock: Stock) -> None:
    stock.put("one", [1])
    assert stock("keys", "export-salt", "salt.key", "--no-passphrase")[0] == 0
    assert stock.ring.export_salt() in (stock.folder / "salt.key").read_text()
    (stock.folder / "salt.key").chmod(0o644)
    code, _, wrong = stock("keys", "import-salt", "salt.key")
    assert (code, len(wrong.splitlines())) == (43, 1)
