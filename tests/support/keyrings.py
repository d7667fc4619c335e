"""A keyring in a folder of its own."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from vmckpt.store.keys.identity import public_of
from vmckpt.store.keys.key_files import KeyKind, key_text
from vmckpt.store.keys.keyring import Keyring


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path / "state" / "keys")


def admin() -> str:
    return key_text(KeyKind.ADMIN, public_of(X25519PrivateKey.generate()))
