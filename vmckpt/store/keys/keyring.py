"""The keys of one writer on its disk: what it seals, signs and trusts with.

    salt                 the domain's salt; the same on all hosts that share chunks
    signing              this writer's private Ed25519 key
    admins/NAME.pub      for whom snapshots are encrypted
    writers/NAME.pub     whose snapshots are believed, besides its own

Nothing in here opens a snapshot: that takes an administrator's identity file. A domain's salt can
be carried in a file to another controller that writes into the same domain.
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
"""Below the state folder."""
_SUFFIX = ".pub"
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._@-]{0,63}")


@dataclass(frozen=True, slots=True)
class Named:
    """A public key that the operator has given a name."""

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
    """This writer's Ed25519 key: a manifest's `Signer`."""

    def __init__(self, seed: bytes) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._private.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        return self._private.sign(message)


class Keyring:
    """The keys in one folder, read from there each time: others may change them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # What a snapshot is made with

    @property
    def encrypts(self) -> bool:
        """Whether new snapshots are encrypted: as soon as an administrator's key is there."""
        return bool(self.admins())

    def sealing(self) -> Sealing:
        """How this writer seals chunks now. Raises KeyRefused."""
        salt = self.salt()
        if self.encrypts:
            return Encrypted(salt or self._new_salt())
        if salt is not None:
            raise KeyRefused(
                f"{self.folder}: a salt but no administrator's key: nobody could read a snapshot",
                hint="vmckpt snapshot keys add NAME KEY",
            )
        return Plain()

    def salt(self) -> bytes | None:
        """The domain's salt; None if there is none yet. Raises KeyRefused."""
        return self._secret("salt", KeyKind.SALT)

    def domain(self) -> str | None:
        """The public id of the domain; None if there is none yet."""
        salt = self.salt()
        return None if salt is None else domain_of(salt)

    def signing(self) -> OwnKey:
        """What this writer signs with, made when it is first asked for. Raises KeyRefused."""
        seed = self._secret("signing", KeyKind.SIGNING)
        if seed is None:
            fresh = Ed25519PrivateKey.generate().private_bytes_raw()
            seed = self._made("signing", KeyKind.SIGNING, fresh)
        return OwnKey(seed)

    def writer(self) -> Named:
        """This writer's public key, under which others can trust it."""
        return Named("self", self.signing().public, KeyKind.WRITER)

    # The domain's salt, which hosts must share to share chunks

    def export_salt(self) -> str:
        """The salt as text: a secret. Raises KeyRefused if there is none."""
        salt = self.salt()
        if salt is None:
            raise KeyRefused(
                f"{self.folder}: there is no domain yet",
                hint="vmckpt snapshot keys add NAME KEY begins one",
            )
        return key_text(KeyKind.SALT, salt)

    def import_salt(self, text: str) -> None:
        """Join the domain of another host. Raises KeyRefused if this one has another salt."""
        salt = parse_key(text, KeyKind.SALT)
        if self._made("salt", KeyKind.SALT, salt) != salt:
            raise KeyRefused(
                f"{self.folder}: this host belongs to another domain already",
                hint=f"move {self.folder / 'salt'} away to make new snapshots in the other one",
            )

    # Administrators: for whom snapshots are encrypted

    def admins(self) -> tuple[Named, ...]:
        """For whom snapshots are encrypted, by name. Raises KeyRefused."""
        return self._list("admins", KeyKind.ADMIN)

    def add_admin(self, name: str, text: str) -> Named:
        """Encrypt for one more, from the next snapshot on. Raises KeyRefused."""
        named = Named(name, parse_key(text, KeyKind.ADMIN), KeyKind.ADMIN)
        _usable(named.key)
        self._add("admins", named, self.admins())
        if self.salt() is None:
            self._new_salt()
        return named

    def remove_admin(self, name: str) -> None:
        """Encrypt no more for somebody. Raises KeyRefused, also for the last one.

        What was wrapped for the key stays so until the wraps are rotated.
        """
        # Without a key the next snapshot would lie open, with nobody having said so.
        if [admin.name for admin in self.admins()] == [name]:
            raise KeyRefused(
                f"{name} is the only administrator: without a key nobody can read the snapshots",
                hint="add another key first",
            )
        self._remove("admins", name)

    # Writers: whose snapshots are believed

    def writers(self) -> tuple[Named, ...]:
        """Other writers that are trusted, by name. Raises KeyRefused."""
        return self._list("writers", KeyKind.WRITER)

    def trust(self, name: str, text: str) -> Named:
        """Believe what one more writer has signed. Raises KeyRefused."""
        named = Named(name, parse_key(text, KeyKind.WRITER), KeyKind.WRITER)
        try:
            Ed25519PublicKey.from_public_bytes(named.key)
        except ValueError as exc:
            raise KeyRefused(f"{name}: this key cannot sign anything") from exc
        self._add("writers", named, self.writers())
        return named

    def distrust(self, name: str) -> None:
        """Believe no more what a writer has signed. Raises KeyRefused."""
        self._remove("writers", name)

    def trusted(self) -> frozenset[bytes]:
        """The keys of all writers that are believed, this one among them. Raises KeyRefused."""
        others = frozenset(writer.key for writer in self.writers())
        # Who only reads needs no key to sign with, and may not be able to write one.
        signs = self._secret("signing", KeyKind.SIGNING) is not None
        return others | {self.writer().key} if signs else others

    # Files

    def _secret(self, name: str, kind: KeyKind) -> bytes | None:
        path = self.folder / name
        text = key_files.read(path, secret=True)
        return None if text is None else parse_key(text, kind, where=str(path))

    def _made(self, name: str, kind: KeyKind, key: bytes) -> bytes:
        """Write a secret; if another process was faster, take its one."""
        if key_files.write(self.folder / name, key_text(kind, key) + "\n"):
            return key
        found = self._secret(name, kind)
        if found is None:
            raise KeyRefused(f"{self.folder / name} comes and goes", hint="try again")
        return found

    def _new_salt(self) -> bytes:
        return self._made("salt", KeyKind.SALT, secrets.token_bytes(SALT))

    def _list(self, folder: str, kind: KeyKind) -> tuple[Named, ...]:
        found = []
        for name in key_files.names(self.folder / folder, _SUFFIX):
            path = self.folder / folder / f"{name}{_SUFFIX}"
            text = key_files.read(path, secret=False)
            if text is not None:  # removed since
                found.append(Named(name, parse_key(text, kind, where=str(path)), kind))
        return tuple(found)

    def _add(self, folder: str, named: Named, known: tuple[Named, ...]) -> None:
        if not _NAME.fullmatch(named.name):
            raise KeyRefused(
                f"{named.name[:80]!r} cannot name a key",
                hint="use letters, digits, points, dashes, @ and _",
            )
        for one in known:
            if one.key == named.key and one.name != named.name:
                raise KeyRefused(f"this key is there already, as {one.name}")
            if one.name == named.name and one.key != named.key:
                raise KeyRefused(
                    f"{named.name} has another key", hint="take another name, or remove that first"
                )
        path = self.folder / folder / f"{named.name}{_SUFFIX}"
        key_files.write(path, named.text + "\n", replace=True)

    def _remove(self, folder: str, name: str) -> None:
        path = self.folder / folder / f"{name}{_SUFFIX}"
        if not _NAME.fullmatch(name) or not key_files.remove(path):
            raise KeyRefused(f"no key named {name[:80]!r}", hint="vmckpt snapshot keys list")


def _usable(key: bytes) -> None:
    """Refuse points of low order: what is wrapped for them anybody can unwrap."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError as exc:
        raise KeyRefused("nothing can be encrypted for this key") from exc


def write(ring: Keyring, path: Path, passphrase: str | None, *, cost: int = COST) -> str:
    """Put the domain's salt into a new file; the domain. Raises KeyRefused."""
    line = ring.export_salt()
    if passphrase is not None:
        salt = parse_key(line, KeyKind.SALT)
        line = key_text(KeyKind.LOCKED_SALT, identity.locked(salt, passphrase, cost))
    told = (
        "# Who has this and may read the store can find out whether it has what he can guess.\n"
        f"{line}\n"
    )
    if not key_files.write(path, told):
        raise KeyRefused(f"{path} is there already", hint="name another file")
    domain = ring.domain()
    assert domain is not None
    return domain


def load(ring: Keyring, path: Path, passphrase: Passphrase | None) -> str:
    """Join the domain whose salt is in a file; the domain. Raises KeyRefused."""
    told = key_files.read(path, secret=True)
    if told is None:
        raise KeyRefused(f"{path}: no such file", hint="vmckpt snapshot keys export-salt makes one")
    lines = [line.strip() for line in told.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if len(lines) != 1:
        raise KeyRefused(f"{path}: it has {len(lines)} keys, not one", hint="name the right file")
    [line] = lines
    if line.startswith(f"{KeyKind.LOCKED_SALT}:"):
        box = parse_key(line, KeyKind.LOCKED_SALT, length=LOCKED, where=str(path))
        if passphrase is None:
            raise KeyRefused(f"{path}: it has a passphrase", hint="run it where it can be asked")
        line = key_text(KeyKind.SALT, identity.unlocked(box, passphrase, str(path)))
    else:
        parse_key(line, KeyKind.SALT, where=str(path))
    ring.import_salt(line)
    domain = ring.domain()
    assert domain is not None
    return domain
