"""Keys as text: one word each, which says what kind of key it is and shows a slip of the pen.

Pure.
"""

import base64
import binascii
from enum import StrEnum

from blake3 import blake3

from vmckpt.errors import KeyRefused
from vmckpt.store.sealing import derive

_CHECK = 4
# The longest is a locked identity: 112 letters.
_LONGEST = 256


class KeyKind(StrEnum):
    """The word in front of a key."""

    SALT = "vmckpt-salt"
    """Secret: what makes a domain."""
    SIGNING = "vmckpt-writer"
    """Secret: what a writer signs with."""
    WRITER = "vmckpt-writer-pub"
    ADMIN = "vmckpt-admin-pub"
    IDENTITY = "vmckpt-admin"
    """Secret: what opens snapshots."""
    LOCKED = "vmckpt-admin-locked"
    """The same, behind a passphrase."""
    LOCKED_SALT = "vmckpt-salt-locked"


_WORDS = {
    KeyKind.SALT: "a domain's salt",
    KeyKind.SIGNING: "a writer's private key",
    KeyKind.WRITER: "a writer's public key",
    KeyKind.ADMIN: "an administrator's public key",
    KeyKind.IDENTITY: "an administrator's private key",
    KeyKind.LOCKED: "an administrator's private key with a passphrase",
    KeyKind.LOCKED_SALT: "a domain's salt with a passphrase",
}


def show(kind: KeyKind, key: bytes) -> str:
    """A key as text."""
    text = base64.urlsafe_b64encode(key + _check(kind, key)).decode().rstrip("=")
    return f"{kind}:{text}"


def read(text: str, kind: KeyKind, *, length: int = 32, where: str = "") -> bytes:
    """A key from its text. Raises KeyRefused, which never repeats a key: it may be a secret."""
    place = f"{where}: " if where else ""
    word, _, rest = text.strip()[:_LONGEST].partition(":")
    if word != kind:
        other = next((_WORDS[known] for known in KeyKind if known == word), "something else")
        raise KeyRefused(
            f"{place}this is {other}, not {_WORDS[kind]}", mend=f"give one that begins {kind}:"
        )
    try:
        raw = base64.b64decode(rest + "=" * (-len(rest) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    key, check = raw[:-_CHECK], raw[-_CHECK:]
    # Text that names the same bytes in another way is a slip too, if a harmless one.
    if len(key) != length or check != _check(kind, key) or show(kind, key) != text.strip():
        raise KeyRefused(
            f"{place}{_WORDS[kind]} is mistyped or cut off", mend="copy the whole of it again"
        )
    return key


def fingerprint(key: bytes) -> str:
    """A short name of a public key, for messages and lists."""
    return key_id(key).hex()


def key_id(key: bytes) -> bytes:
    """Which public key is meant, in 16 bytes."""
    return derive(key, "vmckpt key id v1")[:16]


def _check(kind: KeyKind, key: bytes) -> bytes:
    return blake3(kind.encode() + b"\0" + key, derive_key_context="vmckpt key text v1").digest()[
        :_CHECK
    ]
