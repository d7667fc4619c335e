"""Small secret files, and keys in text form.

The files are written atomically and can be read only by their owner. In text form, a key is one
word. It begins with the kind of key and ends with a checksum that detects typing errors.
"""

import base64
import binascii
import os
import secrets
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from blake3 import blake3

from vmckpt.errors import KeyRefused
from vmckpt.store.format.sealing import derive
from vmckpt.util.atomic_file import sync_folder

# Key files are at most a few hundred bytes long.
_MOST = 4096


def write(path: Path, text: str, *, replace: bool = False) -> bool:
    """Write a file durably, with mode 0600.

    If the file exists and `replace` is not set, returns False. Raises KeyRefused.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        folder(path.parent)
        try:
            _fill(temporary, text)
            if replace:
                temporary.replace(path)
            else:
                # Unlike a rename, a link does not replace a file that another process has created.
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    except FileExistsError:
        return False
    except OSError as exc:
        raise _refused(path, "written", exc) from exc
    return True


def _fill(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        rest = text.encode()
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path, *, secret: bool) -> str | None:
    """Return a file's text; None if the file does not exist.

    `secret`: refuse a file that other users can read. Raises KeyRefused.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise _refused(path, "read", exc) from exc
    try:
        mode = os.fstat(descriptor).st_mode
        if secret and mode & 0o077:
            raise KeyRefused(
                f"{path}: other users can read this key (mode {mode & 0o777:o})",
                hint=f"run chmod 600 {path}",
            )
        return os.read(descriptor, _MOST).decode("utf-8")
    except OSError as exc:
        raise _refused(path, "read", exc) from exc
    except UnicodeDecodeError as exc:
        raise KeyRefused(f"{path} is not a key file", hint="specify the correct file") from exc
    finally:
        os.close(descriptor)


def remove(path: Path) -> bool:
    """Remove a file durably. Returns False if the file does not exist. Raises KeyRefused."""
    try:
        path.unlink()
        sync_folder(path.parent)
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise _refused(path, "removed", exc) from exc
    return True


def names(path: Path, suffix: str) -> list[str]:
    """Return the names of all files in a directory that end in `suffix`, sorted.

    Removes the suffix from the names. Raises KeyRefused.
    """
    try:
        return sorted(
            entry.name.removesuffix(suffix)
            for entry in path.iterdir()
            if entry.name.endswith(suffix) and not entry.name.startswith(".")
        )
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise _refused(path, "read", exc) from exc


def folder(path: Path) -> None:
    """Create a directory and its parents, with mode 0700. Keeps existing directories.

    Raises OSError.
    """
    if path.is_dir():
        return
    folder(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        sync_folder(path.parent)


def _refused(path: Path, done: str, exc: OSError) -> KeyRefused:
    return KeyRefused(f"{path}: the key cannot be {done}: {exc.strerror or exc}")


_CHECK = 4
# The longest key is a locked identity: 112 characters.
_LONGEST = 256


class KeyKind(StrEnum):
    """The kind of a key: the prefix of its text form."""

    SALT = "vmckpt-salt"
    """Secret: the salt that defines a domain."""
    SIGNING = "vmckpt-writer"
    """Secret: a writer's private signing key."""
    WRITER = "vmckpt-writer-pub"
    ADMIN = "vmckpt-admin-pub"
    IDENTITY = "vmckpt-admin"
    """Secret: the private key that decrypts snapshots."""
    LOCKED = "vmckpt-admin-locked"
    """The private key that decrypts snapshots, protected by a passphrase."""
    LOCKED_SALT = "vmckpt-salt-locked"


_WORDS = {
    KeyKind.SALT: "a domain's salt",
    KeyKind.SIGNING: "a writer's private key",
    KeyKind.WRITER: "a writer's public key",
    KeyKind.ADMIN: "an administrator's public key",
    KeyKind.IDENTITY: "an administrator's private key",
    KeyKind.LOCKED: "an administrator's passphrase-protected private key",
    KeyKind.LOCKED_SALT: "a domain's passphrase-protected salt",
}


def key_text(kind: KeyKind, key: bytes) -> str:
    """Convert a key to text form."""
    text = base64.urlsafe_b64encode(key + _check(kind, key)).decode().rstrip("=")
    return f"{kind}:{text}"


def parse_key(text: str, kind: KeyKind, *, length: int = 32, where: str = "") -> bytes:
    """Parse the text form of a key of `length` bytes.

    `where` is the file, for messages. Raises KeyRefused. The error message never contains the key,
    because the key may be secret.
    """
    place = f"{where}: " if where else ""
    word, _, rest = text.strip()[:_LONGEST].partition(":")
    if word != kind:
        other = next((_WORDS[known] for known in KeyKind if known == word), "something else")
        raise KeyRefused(
            f"{place}this is {other}, not {_WORDS[kind]}",
            hint=f"use a key that begins with {kind}:",
        )
    try:
        raw = base64.b64decode(rest + "=" * (-len(rest) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    key, check = raw[:-_CHECK], raw[-_CHECK:]
    # A different base64 text for the same bytes is a typing error, too.
    if len(key) != length or check != _check(kind, key) or key_text(kind, key) != text.strip():
        raise KeyRefused(
            f"{place}{_WORDS[kind]} is mistyped or truncated", hint="copy the complete key again"
        )
    return key


def fingerprint(key: bytes) -> str:
    """Return the fingerprint of a public key, in hex, for messages and lists."""
    return key_id(key).hex()


def key_id(key: bytes) -> bytes:
    """Return the ID of a public key: 16 bytes."""
    return derive(key, "vmckpt key id v1")[:16]


def _check(kind: KeyKind, key: bytes) -> bytes:
    return blake3(kind.encode() + b"\0" + key, derive_key_context="vmckpt key text v1").digest()[
        :_CHECK
    ]
