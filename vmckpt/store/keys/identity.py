"""An administrator's private key, which decrypts snapshots. Keep the key file off the hosts."""

import secrets
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from vmckpt.errors import KeyRefused
from vmckpt.store.keys import key_files
from vmckpt.store.keys.key_files import KeyKind, key_text, parse_key

Passphrase = Callable[[], str]
"""A function that asks the operator for the passphrase once."""
COST = 17
"""scrypt's N is 2^17. Each guess at the passphrase takes 128 MiB and about half a second."""
# The limit keeps an untrusted file from exhausting the memory: 2^18 takes 256 MiB.
_DEAREST = 18
_CHEAPEST = 10
_SALT = 16
_KEY = 32
LOCKED = 1 + _SALT + _KEY + 16
"""Length, in bytes, of a 32-byte secret after encryption with a passphrase."""


def create(path: Path, passphrase: str | None = None, *, cost: int = COST) -> bytes:
    """Write a new identity to a new file. Returns the identity's public key.

    `cost` is the base-2 logarithm of scrypt's N. Raises KeyRefused, for example if the file exists.
    """
    private = X25519PrivateKey.generate()
    if not key_files.write(path, text(private, passphrase, cost=cost)):
        raise KeyRefused(
            f"{path} already exists and may be the only key to some snapshots",
            hint="specify a different file",
        )
    return public_of(private)


def load(path: Path, passphrase: Passphrase | None = None) -> X25519PrivateKey:
    """Read the identity in a file. Raises KeyRefused.

    `passphrase` is called if the file is protected by a passphrase; None: there is no terminal.
    """
    told = key_files.read(path, secret=True)
    if told is None:
        raise KeyRefused(f"{path}: no such identity file", hint="specify the file with --identity")
    return parse(told, passphrase, where=str(path))


def parse(told: str, passphrase: Passphrase | None, *, where: str) -> X25519PrivateKey:
    """Parse the text of an identity file. For the arguments see `load`. Raises KeyRefused."""
    lines = [line.strip() for line in told.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if len(lines) != 1:
        raise KeyRefused(
            f"{where}: an identity file must contain one key, not {len(lines)}",
            hint="specify the correct file",
        )
    if not lines[0].startswith(f"{KeyKind.LOCKED}:"):
        return X25519PrivateKey.from_private_bytes(
            parse_key(lines[0], KeyKind.IDENTITY, where=where)
        )
    box = parse_key(lines[0], KeyKind.LOCKED, length=LOCKED, where=where)
    if passphrase is None:
        raise KeyRefused(
            f"{where}: this identity needs a passphrase", hint="run the command in a terminal"
        )
    return X25519PrivateKey.from_private_bytes(unlocked(box, passphrase, where))


def text(private: X25519PrivateKey, passphrase: str | None, *, cost: int = COST) -> str:
    """Return the text of an identity file. Raises KeyRefused if the passphrase is empty.

    `passphrase`: None: do not encrypt the key; `cost`: binary logarithm of scrypt's cost.
    """
    if passphrase is None:
        line = key_text(KeyKind.IDENTITY, private.private_bytes_raw())
    else:
        line = key_text(KeyKind.LOCKED, locked(private.private_bytes_raw(), passphrase, cost))
    return (
        "# Keep this file secret. It opens the snapshots that are encrypted for this public key:\n"
        f"# {key_text(KeyKind.ADMIN, public_of(private))}\n{line}\n"
    )


def public_of(private: X25519PrivateKey) -> bytes:
    """Return the identity's public key, 32 bytes. Snapshots are encrypted for this key."""
    return private.public_key().public_bytes_raw()


def locked(secret: bytes, passphrase: str, cost: int = COST) -> bytes:
    """Encrypt a 32-byte secret with a passphrase. Raises KeyRefused if the passphrase is empty.

    `cost`: binary logarithm of scrypt's cost.
    """
    if not passphrase:
        raise KeyRefused(
            "the passphrase is empty", hint="enter a passphrase, or choose not to use one"
        )
    head = bytes([cost]) + secrets.token_bytes(_SALT)
    # The nonce may be constant: the salt is fresh, so this key is used only once.
    return head + _cipher(head, passphrase).encrypt(bytes(12), secret, head)


def unlocked(told: bytes, passphrase: Passphrase, where: str) -> bytes:
    """Decrypt a secret that `locked` encrypted. Raises KeyRefused."""
    head, box = told[: 1 + _SALT], told[1 + _SALT :]
    if not _CHEAPEST <= head[0] <= _DEAREST:
        raise KeyRefused(
            f"{where}: scrypt cost 2^{head[0]} is not between 2^{_CHEAPEST} and 2^{_DEAREST}",
            hint="specify an intact copy of the file",
        )
    try:
        return _cipher(head, passphrase()).decrypt(bytes(12), box, head)
    except InvalidTag as exc:
        raise KeyRefused(f"{where}: wrong passphrase", hint="try again") from exc


def _cipher(head: bytes, passphrase: str) -> AESGCM:
    scrypt = Scrypt(salt=head[1:], length=_KEY, n=1 << head[0], r=8, p=1)
    return AESGCM(scrypt.derive(passphrase.encode("utf-8", "surrogateescape")))
