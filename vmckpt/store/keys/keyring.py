"""A directory with one writer's keys for sealing, signing and verifying.

    salt                 the domain's salt; the same on all hosts that share chunks
    signing              this writer's private Ed25519 key
    admins/NAME.pub      administrators: snapshots are encrypted for these keys
    writers/NAME.pub     other writers whose snapshots are trusted

None of these keys can decrypt a snapshot. Decryption requires an administrator's identity file. A
domain's salt can be exported to a file, and imported on another controller. That controller then
writes to the same domain.
"""

import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from vmckpt.errors import KeyRefused
from vmckpt.store.format.sealing import SALT, Encrypted, Plain, Sealing, domain_of
from vmckpt.store.keys import identity, key_files
from vmckpt.store.keys.identity import COST, LOCKED, Passphrase
from vmckpt.store.keys.key_files import KeyKind, fingerprint, key_text, parse_key

FOLDER = "keys"
"""Name of the keyring's directory in the state directory."""
_SUFFIX = ".pub"
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._@-]{0,63}")


@dataclass(frozen=True, slots=True)
class Named:
    """A public key, and the name that the operator chose for the key."""

    name: str
    key: bytes
    kind: KeyKind

    @property
    def text(self) -> str:
        return key_text(self.kind, self.key)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.key)


class OwnKey:
    """This writer's Ed25519 key; implements `manifest.Signer`."""

    def __init__(self, seed: bytes) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._private.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        return self._private.sign(message)


class Keyring:
    """The keys in one directory.

    Every call reads the files again, because other processes may change them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # The keys for creating snapshots

    @property
    def encrypts(self) -> bool:
        """Whether new snapshots are encrypted. True if there is an administrator's key.

        Raises KeyRefused.
        """
        return bool(self.admins())

    def sealing(self) -> Sealing:
        """Return the sealing that this writer uses for chunks. Raises KeyRefused.

        If a salt is needed and missing, creates the salt.
        """
        salt = self.salt()
        if self.encrypts:
            return Encrypted(salt or self._new_salt())
        if salt is not None:
            raise KeyRefused(
                f"{self.folder} has a salt but no administrator's key, so no key could decrypt new"
                " snapshots",
                hint="run vmckpt snapshot keys add NAME KEY",
            )
        return Plain()

    def salt(self) -> bytes | None:
        """Return the domain's salt; None if there is no salt yet. Raises KeyRefused."""
        return self._secret("salt", KeyKind.SALT)

    def domain(self) -> str | None:
        """Return the domain's public ID; None if there is no domain yet. Raises KeyRefused."""
        salt = self.salt()
        return None if salt is None else domain_of(salt)

    def signing(self) -> OwnKey:
        """Return this writer's signing key. The first call creates the key. Raises KeyRefused."""
        seed = self._secret("signing", KeyKind.SIGNING)
        if seed is None:
            fresh = Ed25519PrivateKey.generate().private_bytes_raw()
            seed = self._made("signing", KeyKind.SIGNING, fresh)
        return OwnKey(seed)

    def writer(self) -> Named:
        """Return this writer's public key. Raises KeyRefused.

        Another controller must add this key to trust this writer's snapshots.
        """
        return Named("self", self.signing().public, KeyKind.WRITER)

    # The domain's salt: writers with the same salt share chunks

    def export_salt(self) -> str:
        """Return the salt, which is secret, as text. Raises KeyRefused, also if it is missing."""
        salt = self.salt()
        if salt is None:
            raise KeyRefused(
                f"{self.folder} has no domain yet",
                hint="create one with vmckpt snapshot keys add NAME KEY",
            )
        return key_text(KeyKind.SALT, salt)

    def import_salt(self, text: str) -> None:
        """Join the domain with the given salt.

        Raises KeyRefused if the text is invalid, or if this host has a different salt.
        """
        salt = parse_key(text, KeyKind.SALT)
        if self._made("salt", KeyKind.SALT, salt) != salt:
            raise KeyRefused(
                f"{self.folder}: this host already belongs to another domain",
                hint=f"move {self.folder / 'salt'} away to create new snapshots in the new domain",
            )

    # Administrators: snapshots are encrypted for their keys

    def admins(self) -> tuple[Named, ...]:
        """Return all administrators' keys, sorted by name. Raises KeyRefused.

        Snapshots are encrypted for these keys.
        """
        return self._list("admins", KeyKind.ADMIN)

    def add_admin(self, name: str, text: str) -> Named:
        """Add an administrator's key. New snapshots are encrypted for this key as well.

        `name`: a name for the key; `text`: the public key in text form. If there is no salt yet,
        creates the salt. Raises KeyRefused.
        """
        named = Named(name, parse_key(text, KeyKind.ADMIN), KeyKind.ADMIN)
        _usable(named.key)
        self._add("admins", named, self.admins())
        if self.salt() is None:
            self._new_salt()
        return named

    def remove_admin(self, name: str) -> None:
        """Remove an administrator's key. New snapshots are no longer encrypted for this key.

        The data keys of existing snapshots stay wrapped for the key until the wraps are rotated.
        Raises KeyRefused, for example if this is the last key.
        """
        # Without any administrator's key, the next snapshot would silently be unencrypted.
        if [admin.name for admin in self.admins()] == [name]:
            raise KeyRefused(
                f"cannot remove {name}, the only administrator: no key could decrypt new snapshots",
                hint="add another administrator's key first",
            )
        self._remove("admins", name)

    # Writers: their snapshots are trusted

    def writers(self) -> tuple[Named, ...]:
        """Return the keys of other trusted writers, sorted by name. Raises KeyRefused."""
        return self._list("writers", KeyKind.WRITER)

    def trust(self, name: str, text: str) -> Named:
        """Trust another writer's signatures. Raises KeyRefused.

        `name`: a name for the writer; `text`: its public key in text form.
        """
        named = Named(name, parse_key(text, KeyKind.WRITER), KeyKind.WRITER)
        try:
            Ed25519PublicKey.from_public_bytes(named.key)
        except ValueError as exc:
            raise KeyRefused(f"{name}: not a valid Ed25519 public key") from exc
        self._add("writers", named, self.writers())
        return named

    def distrust(self, name: str) -> None:
        """Stop trusting a writer's signatures. Raises KeyRefused."""
        self._remove("writers", name)

    def trusted(self) -> frozenset[bytes]:
        """Return the keys of all trusted writers, including this one. Raises KeyRefused."""
        others = frozenset(writer.key for writer in self.writers())
        # A host that only reads snapshots needs no signing key, and may be unable to write one.
        signs = self._secret("signing", KeyKind.SIGNING) is not None
        return others | {self.writer().key} if signs else others

    # Files

    def _secret(self, name: str, kind: KeyKind) -> bytes | None:
        path = self.folder / name
        text = key_files.read(path, secret=True)
        return None if text is None else parse_key(text, kind, where=str(path))

    def _made(self, name: str, kind: KeyKind, key: bytes) -> bytes:
        """Write a secret to the file `name`, unless the file exists. Returns the file's secret.

        Raises KeyRefused.
        """
        if key_files.write(self.folder / name, key_text(kind, key) + "\n"):
            return key
        found = self._secret(name, kind)
        if found is None:
            raise KeyRefused(
                f"{self.folder / name} was removed while it was being written", hint="try again"
            )
        return found

    def _new_salt(self) -> bytes:
        return self._made("salt", KeyKind.SALT, secrets.token_bytes(SALT))

    def _list(self, folder: str, kind: KeyKind) -> tuple[Named, ...]:
        found = []
        for name in key_files.names(self.folder / folder, _SUFFIX):
            path = self.folder / folder / f"{name}{_SUFFIX}"
            text = key_files.read(path, secret=False)
            if text is not None:  # None: removed since the listing
                found.append(Named(name, parse_key(text, kind, where=str(path)), kind))
        return tuple(found)

    def _add(self, folder: str, named: Named, known: tuple[Named, ...]) -> None:
        if not _NAME.fullmatch(named.name):
            raise KeyRefused(
                f"{named.name[:80]!r} is not a valid key name",
                hint="use letters, digits, dots, dashes, @ and _",
            )
        for one in known:
            if one.key == named.key and one.name != named.name:
                raise KeyRefused(f"this key already exists as {one.name}")
            if one.name == named.name and one.key != named.key:
                raise KeyRefused(
                    f"there is already a different key named {named.name}",
                    hint="use another name, or remove the existing key first",
                )
        path = self.folder / folder / f"{named.name}{_SUFFIX}"
        key_files.write(path, named.text + "\n", replace=True)

    def _remove(self, folder: str, name: str) -> None:
        path = self.folder / folder / f"{name}{_SUFFIX}"
        if not _NAME.fullmatch(name) or not key_files.remove(path):
            raise KeyRefused(
                f"there is no key named {name[:80]!r}", hint="run vmckpt snapshot keys list"
            )


def _usable(key: bytes) -> None:
    """Check that a public key is not a point of low order. Raises KeyRefused.

    If a data key is wrapped for a point of low order, no private key is needed to unwrap it.
    """
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError as exc:
        raise KeyRefused("this key is not secure for encryption") from exc


def write(ring: Keyring, path: Path, passphrase: str | None, *, cost: int = COST) -> str:
    """Write the domain's salt to a new file. Returns the domain's public ID. Raises KeyRefused.

    `passphrase` protects the file; None: no protection. `cost` is the base-2 logarithm of scrypt's
    N.
    """
    line = ring.export_salt()
    if passphrase is not None:
        salt = parse_key(line, KeyKind.SALT)
        line = key_text(KeyKind.LOCKED_SALT, identity.locked(salt, passphrase, cost))
    told = (
        "# Keep this file secret: with the salt and access to a store, an attacker can confirm"
        " guesses at the content of snapshots.\n"
        f"{line}\n"
    )
    if not key_files.write(path, told):
        raise KeyRefused(f"{path} already exists", hint="specify a different file")
    domain = ring.domain()
    assert domain is not None
    return domain


def load(ring: Keyring, path: Path, passphrase: Passphrase | None) -> str:
    """Join the domain whose salt is in a file. Returns the domain's public ID.

    `passphrase` is called if the file is protected by a passphrase; None: there is no terminal.
    Raises KeyRefused.
    """
    told = key_files.read(path, secret=True)
    if told is None:
        raise KeyRefused(
            f"{path}: no such file",
            hint="run vmckpt snapshot keys export-salt FILE on the other controller, and copy the"
            " file to this machine",
        )
    lines = [line.strip() for line in told.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if len(lines) != 1:
        raise KeyRefused(
            f"{path} must contain one key, not {len(lines)}", hint="specify the correct file"
        )
    [line] = lines
    if line.startswith(f"{KeyKind.LOCKED_SALT}:"):
        box = parse_key(line, KeyKind.LOCKED_SALT, length=LOCKED, where=str(path))
        if passphrase is None:
            raise KeyRefused(f"{path} needs a passphrase", hint="run the command in a terminal")
        line = key_text(KeyKind.SALT, identity.unlocked(box, passphrase, str(path)))
    else:
        parse_key(line, KeyKind.SALT, where=str(path))
    ring.import_salt(line)
    domain = ring.domain()
    assert domain is not None
    return domain
