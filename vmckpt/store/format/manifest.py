"""A manifest: the object that completely describes one snapshot. It is written last.

     0   8   magic "vmckptM" and a line feed
     8   2   version, little endian: 1; all numbers are
    10   2   flags: bit 0: the private part is encrypted
    12   4   length of the public part
    16   8   length of the names
    24   8   length of the private part
    32       public part: JSON
             names of all chunks, 32 bytes each, ascending
             private part (see docs/formats.md): AES-256-GCM with the data key, or plain
        64   Ed25519 signature of the snapshot's ID and the BLAKE3 of all preceding bytes
        32   BLAKE3 of all preceding bytes

Every version of the format begins with magic and version, and ends with the BLAKE3. So damage is
not mistaken for a newer version. A small object of a store consists of text or bytes, followed by a
line with the BLAKE3 of key and body. The BLAKE3 reveals changed bits, and objects that were stored
under another object's key.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from blake3 import blake3
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from vmckpt.errors import KeyRefused, StoreDamaged, StoreError, StoreNewer
from vmckpt.store.backend.base import Data
from vmckpt.store.format import private_part
from vmckpt.store.format.chunk_map import Digests, ascending, ordered
from vmckpt.store.format.metadata import PUBLIC, Public, dumped, loaded
from vmckpt.store.format.private_part import Private
from vmckpt.store.format.sealing import PLAIN, Encrypted, Plain, Sealing, derive, domain_of
from vmckpt.store.keys.key_files import KeyKind, key_text

MAGIC = b"vmckptM\n"
VERSION = 1
LARGEST = 1 << 30
"""Maximum size of a manifest, in bytes, for reading and writing."""
_LARGEST_PUBLIC = 256 << 10
_HEAD = 32
_SIGNATURE = 64
_SUM = 32
_ENCRYPTED = 1
# The nonce may be constant, because a data key encrypts only one private part.
_NONCE = bytes(12)


class Signer(Protocol):
    """Signs with a writer's Ed25519 key. The key may be on another host."""

    @property
    def public(self) -> bytes:
        """The writer's public key."""

    def sign(self, message: bytes) -> bytes:
        """Sign a message that was built by `signed`. Returns the signature.

        Raises KeyRefused, and errors of the connection to the host that has the key.
        """


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys for writing a manifest."""

    signing: Signer
    salt: bytes | None = field(default=None, repr=False)
    data_key: bytes | None = field(default=None, repr=False)
    """32 fresh random bytes for each manifest. If the manifest is not encrypted, both salt and data
    key are None."""

    def sealing(self) -> Sealing:
        """Return the sealing for the snapshot's chunks. Raises KeyRefused for an invalid salt."""
        return Plain() if self.salt is None else Encrypted(self.salt)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest that has passed all checks that need no private key."""

    public: Public
    names: Digests
    stored: memoryview
    """The private part as stored: if encrypted, not decrypted yet."""

    @property
    def encrypted(self) -> bool:
        """Whether the private part needs a data key."""
        return self.public.data_key_id is not None

    def private(self, data_key: bytes | None = None) -> Private:
        """Return the private part.

        Raises StoreDamaged, and KeyRefused if the data key is missing or belongs to another
        snapshot.
        """
        return self.opened(data_key)[0]

    def opened(self, data_key: bytes | None = None) -> tuple[Private, Sealing]:
        """Return the private part and the sealing of the chunks. Raises the errors of `private`."""
        where = _where(self.public.id)
        plain = self._opened(data_key, where)
        try:
            private, salt = private_part.read(plain)
            self._fits(private, salt)
        except (StoreDamaged, ValueError) as exc:
            raise _damaged(where, str(exc)) from exc
        return private, Plain() if salt is None else Encrypted(salt)

    def _opened(self, data_key: bytes | None, where: str) -> memoryview:
        if not self.encrypted:
            return self.stored
        if data_key is None:
            raise KeyRefused(
                f"snapshot {self.public.id} is encrypted",
                hint="give an identity file with --identity or VMCKPT_IDENTITY",
            )
        if data_key_id(data_key) != self.public.data_key_id:
            raise KeyRefused(f"the data key in wraps/{self.public.id} belongs to another snapshot")
        try:
            return memoryview(AESGCM(data_key).decrypt(_NONCE, self.stored, self._bound()))
        except InvalidTag as exc:
            raise _damaged(where, "its private part cannot be decrypted") from exc

    def _bound(self) -> bytes:
        return _bound(self.public.id)

    def _fits(self, private: Private, salt: bytes | None) -> None:
        """Check that the private part agrees with the public part. Raises ValueError."""
        if (salt is None) == self.encrypted or self.public.domain != _domain(salt):
            raise ValueError("its salt does not belong to its domain")
        sealing: Sealing = Plain() if salt is None else Encrypted(salt)
        # Garbage collection keeps only listed names, so a chunk that is not listed would be lost.
        if ordered(sealing.name_of(digest) for digest in private.chunks) != self.names:
            raise ValueError("its chunks do not match its list of names")


def encode(public: Public, private: Private, keys: Keys) -> bytes:
    """Return a signed manifest, ready to be published.

    Raises StoreError if a field is invalid or the manifest is too large, KeyRefused, errors of the
    signer, and ValueError if `keys` has only one of salt and data key.
    """
    if (keys.salt is None) != (keys.data_key is None):
        raise ValueError("salt and data key must be given together")
    sealing = keys.sealing()
    try:
        stored = private_part.written(private, keys.salt)
        if keys.data_key is not None:
            stored = AESGCM(keys.data_key).encrypt(_NONCE, stored, _bound(public.id))
        names = ordered(sealing.name_of(digest) for digest in private.chunks)
        told = dumped(
            PUBLIC,
            replace(
                public,
                tags=dict(sorted(public.tags.items())),
                domain=sealing.domain,
                signer=keys.signing.public.hex(),
                private_hash=blake3(stored).hexdigest(),
                data_key_id=None if keys.data_key is None else data_key_id(keys.data_key),
            ),
        )
    except ValueError as exc:
        raise StoreError(f"cannot write snapshot {public.id}: {exc}") from exc
    head = _head(len(told), len(names.raw), len(stored), encrypted=keys.data_key is not None)
    if len(told) > _LARGEST_PUBLIC or _whole(head) > LARGEST:
        raise StoreError(f"snapshot {public.id}: its manifest would be too large")
    hashed = blake3(head).update(told).update(names.raw).update(stored)
    signature = keys.signing.sign(signed(public.id, hashed.digest()))
    if len(signature) != _SIGNATURE:
        raise KeyRefused(f"snapshot {public.id} was not signed")
    return b"".join((head, told, names.raw, stored, signature, hashed.update(signature).digest()))


def decode(data: bytes, snapshot: str, trusted: Collection[bytes] | None) -> Manifest:
    """Check and parse a manifest.

    `trusted` contains the public keys of trusted writers; None: accept every writer. Raises
    StoreDamaged, StoreNewer, and KeyRefused if the manifest's signer is not trusted.
    """
    where = _where(snapshot)
    public, names, stored = _parse(data, where)
    if public.id != snapshot:
        raise _damaged(where, f"it is the manifest of {public.id}")
    if blake3(stored).hexdigest() != public.private_hash:
        raise _damaged(where, "its private part belongs to another snapshot")
    _check_signature(data, public, where)
    if trusted is not None and bytes.fromhex(public.signer) not in trusted:
        key = key_text(KeyKind.WRITER, bytes.fromhex(public.signer))
        raise KeyRefused(
            f"snapshot {snapshot} was signed by a writer that is not trusted here",
            hint=f"if you trust the writer, run vmckpt snapshot keys trust NAME {key}",
        )
    return Manifest(public, names, stored)


def head(data: bytes, snapshot: str, size: int) -> Public | None:
    """Parse the public part from the beginning of a manifest, without verifying it.

    `size` is the size of the complete manifest in bytes. Returns None if `data` is too short or
    invalid. In that case, `decode` the complete manifest to find the error.
    """
    if len(data) < _HEAD or not data.startswith(MAGIC + VERSION.to_bytes(2, "little")):
        return None
    told = _lengths(data[:_HEAD])[0]
    if told > min(_LARGEST_PUBLIC, len(data) - _HEAD) or _whole(data[:_HEAD]) != size:
        return None
    try:
        public = loaded(PUBLIC, data[_HEAD : _HEAD + told])
    except ValueError:
        return None
    return public if public.id == snapshot else None


def references(data: bytes, snapshot: str = "?") -> Digests:
    """Return the names of all chunks that a manifest needs, without checking its signature.

    Garbage collection keeps these chunks. Raises StoreDamaged or StoreNewer. After such an error,
    garbage collection must not remove anything.
    """
    return _parse(data, _where(snapshot))[1]


def signed(snapshot: str, digest: bytes) -> bytes:
    """Return the message to sign for a manifest with this digest.

    The prefix ensures that a signature for any other purpose is not valid for a manifest.
    """
    return b"vmckpt manifest v1\0" + snapshot.encode() + b"\0" + digest


def is_for(message: bytes, snapshot: str) -> bool:
    """Return whether a message to be signed is for a manifest of the given snapshot."""
    return len(message) == len(signed(snapshot, bytes(_SUM))) and message.startswith(
        signed(snapshot, b"")
    )


def data_key_id(data_key: bytes) -> str:
    """Return the public ID of a data key."""
    return derive(data_key, "vmckpt data key id v1")[:16].hex()


def _parse(data: bytes, where: str) -> tuple[Public, Digests, memoryview]:
    _check_frame(data, where)
    head = data[:_HEAD]
    encrypted = int.from_bytes(head[10:12], "little")
    told, named, stored = _lengths(head)
    if told > _LARGEST_PUBLIC or _whole(head) != len(data) or encrypted > _ENCRYPTED:
        raise _damaged(where, "its lengths are invalid")
    view = memoryview(data)
    end = _HEAD + told
    try:
        public = loaded(PUBLIC, data[_HEAD:end])
        names = Digests(view[end : end + named])
    except ValueError as exc:
        raise _damaged(where, str(exc)) from exc
    if (public.data_key_id is not None) != bool(encrypted) or not public.signer:
        raise _damaged(where, "its header contradicts its public part")
    if (public.domain == PLAIN) == bool(encrypted):
        raise _damaged(where, "its domain is invalid")
    if not ascending(names):
        raise _damaged(where, "the names of its chunks are not in ascending order")
    return public, names, view[end + named : end + named + stored]


def _check_frame(data: bytes, where: str) -> None:
    if len(data) > LARGEST:
        raise _damaged(where, f"its size of {len(data)} bytes is too large for a manifest")
    if len(data) < _HEAD + _SIGNATURE + _SUM or not data.startswith(MAGIC):
        raise _damaged(where, "it is not a manifest")
    # The checksum is verified before the version, so that a flipped bit is not mistaken for a newer
    # version.
    if blake3(memoryview(data)[:-_SUM]).digest() != data[-_SUM:]:
        raise _damaged(where, "its checksum is wrong")
    version = int.from_bytes(data[8:10], "little")
    if version > VERSION:
        raise StoreNewer(
            f"{where} has version {version}; this vmckpt supports versions up to {VERSION}",
            hint="use the vmckpt version that wrote the manifest, or a newer one",
        )
    if version != VERSION:
        raise _damaged(where, "its version is invalid")


def _check_signature(data: bytes, public: Public, where: str) -> None:
    end = len(data) - _SIGNATURE - _SUM
    message = signed(public.id, blake3(memoryview(data)[:end]).digest())
    try:
        signer = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public.signer))
        signer.verify(data[end : end + _SIGNATURE], message)
    except (InvalidSignature, ValueError) as exc:
        raise _damaged(where, "its signature is wrong") from exc


def _head(told: int, named: int, stored: int, *, encrypted: bool) -> bytes:
    return b"".join(
        (
            MAGIC,
            VERSION.to_bytes(2, "little"),
            (_ENCRYPTED if encrypted else 0).to_bytes(2, "little"),
            told.to_bytes(4, "little"),
            named.to_bytes(8, "little"),
            stored.to_bytes(8, "little"),
        )
    )


def _lengths(head: bytes) -> tuple[int, int, int]:
    told, named, stored = head[12:16], head[16:24], head[24:32]
    return (
        int.from_bytes(told, "little"),
        int.from_bytes(named, "little"),
        int.from_bytes(stored, "little"),
    )


def _whole(head: bytes) -> int:
    return _HEAD + sum(_lengths(head)) + _SIGNATURE + _SUM


def _bound(snapshot: str) -> bytes:
    return b"vmckpt private part v1\0" + snapshot.encode()


def _domain(salt: bytes | None) -> str:
    return PLAIN if salt is None else domain_of(salt)


def _where(snapshot: str) -> str:
    return f"snapshots/{snapshot}"


def _damaged(where: str, what: str) -> StoreDamaged:
    return StoreDamaged(
        f"{where}: {what}",
        hint="run vmckpt snapshot verify --repair --from STORE",
    )


_MARK = b"\nblake3 "
_TAIL = len(_MARK) + 64 + 1


def framed(key: str, body: Data) -> bytes:
    """Return the bytes of a small object: the body and its checksum."""
    return b"".join((body, _MARK, _sum(key, body), b"\n"))


def unframed(key: str, raw: bytes, where: str) -> bytes:
    """Return the body of a small object. Raises StoreDamaged if the checksum does not match.

    `where` is the store's name, for messages.
    """
    body, tail = raw[: max(0, len(raw) - _TAIL)], raw[-_TAIL:]
    if tail != _MARK + _sum(key, body) + b"\n":
        raise StoreDamaged(
            f"{where}: {key} is damaged: its checksum does not match",
            hint="run vmckpt snapshot verify to look for more damage",
        )
    return body


def written(key: str, values: Mapping[str, Any]) -> bytes:
    """Return the bytes of a small object whose body is JSON."""
    return framed(key, json.dumps(values, indent=1).encode())


def parsed(key: str, raw: bytes, where: str) -> dict[str, Any]:
    """Return the values of a small object whose body is a JSON object. Raises StoreDamaged."""
    body = unframed(key, raw, where)
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise StoreDamaged(f"{where}: {key} is not valid JSON: {str(exc)[:80]}") from exc
    if not isinstance(values, dict):
        raise StoreDamaged(f"{where}: {key} is not a JSON object")
    return values


def _sum(key: str, body: Data) -> bytes:
    return blake3(key.encode() + b"\0").update(body).hexdigest().encode()
