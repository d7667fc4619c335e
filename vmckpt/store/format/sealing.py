"""Seal chunks for the store (compress and encrypt them), and unseal them. Pure.

A chunk's *digest* is the hash of its content. The chunk's key is derived from digest and salt. The
chunk's *name* only identifies the chunk. A *domain* consists of all writers with the same salt.
Within a domain, identical chunks have the same name and are stored once. In different domains,
identical chunks have different names and keys.
"""

import threading
from typing import Protocol

import zstandard
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from vmckpt.errors import KeyRefused, StoreDamaged

DIGEST = 32
SALT = 32
PLAIN = "plain"
"""The domain of chunks that are not encrypted."""
MOST = 4 << 20
"""Maximum plain size of a chunk in bytes: 64 units of a disk."""
_LEVEL = 3
_NONCE = 12


class Sealing(Protocol):
    """Seals and unseals the chunks of one domain. Safe to use from several threads."""

    @property
    def domain(self) -> str:
        """The ID of the domain: derived from the salt, or `PLAIN`."""

    def digest_of(self, plain: bytes | memoryview) -> bytes:
        """Return the digest of a chunk's content: BLAKE3, 32 bytes."""

    def name_of(self, digest: bytes) -> bytes:
        """Return the name, in the store, of the chunk with the given digest."""

    def seal(self, plain: bytes | memoryview, digest: bytes) -> bytes:
        """Seal a chunk whose digest is known. Raises ValueError if the chunk is too large."""

    def unseal(self, box: bytes | memoryview, digest: bytes) -> bytes:
        """Return the content of a sealed chunk.

        Raises StoreDamaged if the content does not match the digest.
        """


def damaged(name: bytes, what: str) -> StoreDamaged:
    """Build the error for a damaged chunk. `name` is the chunk's public name."""
    return StoreDamaged(
        f"chunk {name.hex()[:16]}: {what}",
        hint="run vmckpt snapshot verify to see which snapshots use this chunk",
    )


class Plain:
    """Seals chunks without encryption, in the domain `PLAIN`."""

    domain = PLAIN

    def __init__(self) -> None:
        self._zstd = _Zstd()

    def digest_of(self, plain: bytes | memoryview) -> bytes:
        return blake3(flat(plain)).digest()

    def name_of(self, digest: bytes) -> bytes:
        return digest

    def seal(self, plain: bytes | memoryview, digest: bytes) -> bytes:
        return self._zstd.pack(flat(plain))

    def unseal(self, box: bytes | memoryview, digest: bytes) -> bytes:
        return self._zstd.unpack(box, digest, digest)


class Encrypted:
    """Seals chunks with encryption. Unsealing a chunk requires its digest and the domain's salt."""

    def __init__(self, salt: bytes) -> None:
        """Derive the domain's keys from its salt. Raises KeyRefused if the length is wrong."""
        if len(salt) != SALT:
            raise KeyRefused(f"a domain's salt must have {SALT} bytes, not {len(salt)}")
        self.domain = domain_of(salt)
        self._names = derive(salt, "vmckpt chunk name v1")
        self._keys = derive(salt, "vmckpt chunk key v1")
        self._zstd = _Zstd()

    def digest_of(self, plain: bytes | memoryview) -> bytes:
        return blake3(flat(plain)).digest()

    def name_of(self, digest: bytes) -> bytes:
        return blake3(digest, key=self._names).digest()

    def seal(self, plain: bytes | memoryview, digest: bytes) -> bytes:
        packed = self._zstd.pack(flat(plain))
        key = self._key(digest)
        # Another zstd version may compress the same content differently but uses the same key, so
        # the nonce must differ.
        nonce = blake3(packed, key=derive(key, "vmckpt chunk nonce v1")).digest()[:_NONCE]
        return nonce + AESGCM(key).encrypt(nonce, packed, self.name_of(digest))

    def unseal(self, box: bytes | memoryview, digest: bytes) -> bytes:
        name = self.name_of(digest)
        try:
            cipher = AESGCM(self._key(digest))
            packed = cipher.decrypt(bytes(box[:_NONCE]), box[_NONCE:], name)
        except (InvalidTag, ValueError) as exc:
            raise damaged(name, "it cannot be decrypted") from exc
        return self._zstd.unpack(packed, digest, name)

    def _key(self, digest: bytes) -> bytes:
        return blake3(digest, key=self._keys).digest()


def derive(secret: bytes, purpose: str) -> bytes:
    """Derive a 32-byte key for one purpose from a secret."""
    return blake3(secret, derive_key_context=purpose).digest()


def domain_of(salt: bytes) -> str:
    """Return the public ID of the domain with the given salt."""
    return derive(salt, "vmckpt domain id v1")[:16].hex()


def flat(data: bytes | memoryview) -> bytes | memoryview:
    """Return the data as a one-dimensional view of bytes, without copying.

    Raises ValueError if the data is not contiguous.
    """
    if isinstance(data, bytes) or (data.format == "B" and data.ndim == 1 and data.contiguous):
        return data
    if not data.c_contiguous:
        raise ValueError("the data of a chunk is not contiguous in memory")
    return data.cast("B")


class _Zstd(threading.local):
    """A compressor and a decompressor for each thread, because threads must not share them."""

    def __init__(self) -> None:
        self._in = zstandard.ZstdCompressor(level=_LEVEL)
        self._out = zstandard.ZstdDecompressor()

    def pack(self, plain: bytes | memoryview) -> bytes:
        """Compress the content of a chunk. Raises ValueError if the content is too large."""
        if len(plain) > MOST:
            raise ValueError(f"{len(plain)} bytes are too many for one chunk")
        return self._in.compress(plain)

    def unpack(self, packed: bytes | memoryview, digest: bytes, name: bytes) -> bytes:
        """Decompress a chunk, and compare the content with the digest.

        Raises StoreDamaged, with the chunk's name `name` in the message.
        """
        try:
            # The frame header contains the content size. Checking the size first limits how much
            # memory is allocated.
            if not 0 <= zstandard.frame_content_size(packed) <= MOST:
                raise damaged(name, "its stated size is invalid")
            plain = self._out.decompress(packed, max_output_size=MOST, allow_extra_data=False)
        except zstandard.ZstdError as exc:
            raise damaged(name, "it cannot be decompressed") from exc
        if blake3(plain).digest() != digest:
            raise damaged(name, "its content does not match its digest")
        return plain
