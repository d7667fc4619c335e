"""Small secret files (written whole or not at all, readable by their owner alone) and keys as text.

As text a key is one word, which says what kind of key it is and reveals a typing error.
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

# The longest that is ever written has a few hundred bytes.
_MOST = 4096


def write(path: Path, text: str, *, replace: bool = False) -> bool:
    """Write a file, durably, with mode 0600; False if it is there already. Raises KeyRefused."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        folder(path.parent)
        try:
            _fill(temporary, text)
            if replace:
                temporary.replace(path)
            else:
                # Unlike a rename, this leaves alone what another process has made meanwhile.
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
    """A file's text; None if there is none. Raises KeyRefused, also if others may read a secret."""
    try:
        # A pipe would keep us waiting for somebody to write into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise _refused(path, "read", exc) from exc
    try:
        mode = os.fstat(descriptor).st_mode
        if secret and mode & 0o077:
            raise KeyRefused(
                f"{path}: others can read this key (mode {mode & 0o777:o})",
                hint=f"chmod 600 {path}",
            )
        return os.read(descriptor, _MOST).decode("utf-8")
    except OSError as exc:
        raise _refused(path, "read", exc) from exc
    except UnicodeDecodeError as exc:
        raise KeyRefused(f"{path}: this is no key", hint="name the right file") from exc
    finally:
        os.close(descriptor)


def remove(path: Path) -> bool:
    """Remove a file, durably; False if there is none. Raises KeyRefused."""
    try:
        path.unlink()
        sync_folder(path.parent)
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise _refused(path, "removed", exc) from exc
    return True


def names(path: Path, suffix: str) -> list[str]:
    """The files of a folder that end so, without their ending, sorted. Raises KeyRefused."""
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
    """Make a folder, and those above it, for its owner alone; leave one that is there as it is."""
    if path.is_dir():
        return
    folder(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        sync_folder(path.parent)


def _refused(path: Path, done: str, exc: OSError) -> KeyRefused:
    return KeyRefused(f"{path}: the key cannot be {done}: {exc.strerror or exc}")


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


def key_text(kind: KeyKind, key: bytes) -> str:
    """A key as text."""
    text = base64.urlsafe_b64encode(key + _check(kind, key)).decode().rstrip("=")
    return f"{kind}:{text}"


def parse_key(text: str, kind: KeyKind, *, length: int = 32, where: str = "") -> bytes:
    """A key from its text. Raises KeyRefused, which never repeats a key: it may be a secret."""
    place = f"{where}: " if where else ""
    word, _, rest = text.strip()[:_LONGEST].partition(":")
    if word != kind:
        other = next((_WORDS[known] for known in KeyKind if known == word), "something else")
        raise KeyRefused(
            f"{place}this is {other}, not {_WORDS[kind]}", hint=f"give one that begins {kind}:"
        )
    try:
        raw = base64.b64decode(rest + "=" * (-len(rest) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    key, check = raw[:-_CHECK], raw[-_CHECK:]
    # Text that names the same bytes in another way is a slip too, if a harmless one.
    if len(key) != length or check != _check(kind, key) or key_text(kind, key) != text.strip():
        raise KeyRefused(
            f"{place}{_WORDS[kind]} is mistyped or cut off", hint="copy the whole of it again"
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
