"""Seal chunks for the store (compress and encrypt them), and unseal them. Pure.

A chunk's *digest* is the hash of its content and, with the salt, the key to it; its *name* only
identifies the chunk. A *domain* is all writers with the same salt. Within a domain equal content
has the same name, so it is stored once; in another domain it has another name and another key.
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
"""Bytes of the largest chunk: 64 units of a disk."""
_LEVEL = 3
_NONCE = 12


class Sealing(Protocol):
    """Seals and unseals the chunks of one domain. Safe to use from several threads."""

    @property
    def domain(self) -> str:
        """The ID of the domain: derived from the salt, or `PLAIN`."""

    def digest_of(self, plain: bytes | memoryview) -> bytes:
        """Return the digest of a content: BLAKE3, 32 bytes."""

    def name_of(self, digest: bytes) -> bytes:
        """Return the name of the chunk with that digest in the store."""

    def seal(self, plain: bytes | memoryview, digest: bytes) -> bytes:
        """Seal a content whose digest is known. Raises ValueError if it is too large."""

    def unseal(self, box: bytes | memoryview, digest: bytes) -> bytes:
        """Return the content of a sealed chunk. Raises StoreDamaged if it does not match."""


def damaged(name: bytes, what: str) -> StoreDamaged:
    """Return the error for a damaged chunk. `name` is its public name."""
    return StoreDamaged(
        f"chunk {name.hex()[:16]}: {what}", hint="run vmckpt snapshot verify to see what needs it"
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
    """Seals chunks with encryption: reading them takes their digest and the domain's salt."""

    def __init__(self, salt: bytes) -> None:
        """Derive the domain's keys from its salt. Raises KeyRefused if the length is wrong."""
        if len(salt) != SALT:
            raise KeyRefused(f"a domain's salt has {SALT} bytes, not {len(salt)}")
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
        # Another zstd version may compress the same content differently. The key is then the same,
        # so the nonce has to differ.
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
    """Derive a key of 32 bytes for one purpose."""
    return blake3(secret, derive_key_context=purpose).digest()


def domain_of(salt: bytes) -> str:
    """Return the public ID of a salt's domain."""
    return derive(salt, "vmckpt domain id v1")[:16].hex()


def flat(data: bytes | memoryview) -> bytes | memoryview:
    """Return the data as a flat view of bytes, without a copy.

    Raises ValueError if it is not contiguous.
    """
    if isinstance(data, bytes) or (data.format == "B" and data.ndim == 1 and data.contiguous):
        return data
    if not data.c_contiguous:
        raise ValueError("the bytes of a chunk are not contiguous")
    return data.cast("B")


class _Zstd(threading.local):
    """A compressor and a decompressor per thread, as threads must not share them."""

    def __init__(self) -> None:
        self._in = zstandard.ZstdCompressor(level=_LEVEL)
        self._out = zstandard.ZstdDecompressor()

    def pack(self, plain: bytes | memoryview) -> bytes:
        """Compress a content. Raises ValueError if it is too large for a chunk."""
        if len(plain) > MOST:
            raise ValueError(f"{len(plain)} bytes is too large for a chunk")
        return self._in.compress(plain)

    def unpack(self, packed: bytes | memoryview, digest: bytes, name: bytes) -> bytes:
        """Decompress and compare with the digest. Raises StoreDamaged."""
        try:
            # The frame states its size; checking it first bounds the memory that is allocated.
            if not 0 <= zstandard.frame_content_size(packed) <= MOST:
                raise damaged(name, "its stated size is invalid")
            plain = self._out.decompress(packed, max_output_size=MOST, allow_extra_data=False)
        except zstandard.ZstdError as exc:
            raise damaged(name, "it cannot be decompressed") from exc
        if blake3(plain).digest() != digest:
            raise damaged(name, "its content does not match its digest")
        return plain
