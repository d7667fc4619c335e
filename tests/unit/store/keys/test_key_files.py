"""Keys and secrets in files."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.keyrings import admin, ring
from vmckpt.errors import KeyRefused
from vmckpt.store.keys import identity, key_files
from vmckpt.store.keys.key_files import KeyKind, key_text, parse_key
from vmckpt.store.keys.keyring import Keyring

__all__ = ["ring"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_secret_that_others_can_read_is_refused(ring: Keyring, mode: int) -> None:
    ring.add_admin("alice", admin())
    (ring.folder / "salt").chmod(mode)

    with pytest.raises(
        KeyRefused, match=r"other users can read this key \(mode 6.*; run chmod 600 "
    ):
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
