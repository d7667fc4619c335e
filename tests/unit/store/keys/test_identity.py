"""Identities: made once, opened again, with a passphrase or without."""

import stat
from pathlib import Path

import pytest

from vmckpt.errors import KeyRefused
from vmckpt.store.keys import identity
from vmckpt.store.keys.identity import public_of
from vmckpt.store.keys.key_files import KeyKind, key_text

CHEAP = 10


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
    with pytest.raises(KeyRefused, match="needs a passphrase"):
        identity.load(path)
    with pytest.raises(KeyRefused, match="the passphrase is empty"):
        identity.create(tmp_path / "bob", "", cost=CHEAP)
    assert not (tmp_path / "bob").exists()


@pytest.mark.parametrize("cost", [9, 19, 63])
def test_a_passphrase_that_would_take_all_memory_is_not_tried(cost: int) -> None:
    text = key_text(KeyKind.LOCKED, bytes([cost]) + bytes(64))

    with pytest.raises(KeyRefused, match=rf"scrypt cost 2\^{cost} is not between"):
        identity.parse(text, lambda: pytest.fail("asked"), where="file")


@pytest.mark.parametrize("text", ["", "# nothing\n", "a\nb\n", "vmckpt-admin:\n", "\x00"])
def test_what_is_no_identity_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "alice"
    path.write_text(text)
    path.chmod(0o600)

    with pytest.raises(KeyRefused, match=str(path)):
        identity.load(path)
