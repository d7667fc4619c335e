"""From a chunk's bytes to the box that lies in the store, and back. Pure.

A chunk's digest says what it holds and opens it; its name says only that it is the same chunk. One
content gives one name in a domain (all who have the same salt), so it is stored once; in another
domain it has another name and another key.
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
"""The domain of what is not encrypted."""
MOST = 4 << 20
"""Bytes of the largest chunk: 64 units of a disk."""
_LEVEL = 3
_NONCE = 12


class Sealing(Protocol):
    """How one domain seals its chunks. All of it may be called from any thread."""

    @property
    def domain(self) -> str:
        """Who shares chunks: the salt's id, or `PLAIN`."""

    def digest_of(self, plain: bytes | memoryview) -> bytes:
        """What identifies a content."""

    def name_of(self, digest: bytes) -> bytes:
        """Under which name the store has it."""

    def seal(self, plain: bytes | memoryview, digest: bytes) -> bytes:
        """The box for a content whose digest is known."""

    def unseal(self, box: bytes | memoryview, digest: bytes) -> bytes:
        """The content of a box. Raises StoreDamaged if it is not what was sealed."""


def damaged(name: bytes, what: str) -> StoreDamaged:
    """Say of a chunk, by its public name, what is wrong with it."""
    return StoreDamaged(
        f"chunk {name.hex()[:16]}: {what}", hint="run vmckpt snapshot verify to see what needs it"
    )


class Plain:
    """Chunks that everybody can read, in the domain of all who do not encrypt."""

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
    """Chunks that only those can read who know their digest and the domain's salt."""

    def __init__(self, salt: bytes) -> None:
        """Raises KeyRefused if that cannot be a salt."""
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
        # Another zstd packs the same content in another way: the same key then needs another nonce.
        nonce = blake3(packed, key=derive(key, "vmckpt chunk nonce v1")).digest()[:_NONCE]
        return nonce + AESGCM(key).encrypt(nonce, packed, self.name_of(digest))

    def unseal(self, box: bytes | memoryview, digest: bytes) -> bytes:
        name = self.name_of(digest)
        try:
            cipher = AESGCM(self._key(digest))
            packed = cipher.decrypt(bytes(box[:_NONCE]), box[_NONCE:], name)
        except (InvalidTag, ValueError) as exc:
            raise damaged(name, "it is not what was sealed") from exc
        return self._zstd.unpack(packed, digest, name)

    def _key(self, digest: bytes) -> bytes:
        return blake3(digest, key=self._keys).digest()


def derive(secret: bytes, purpose: str) -> bytes:
    """A key of 32 bytes for one purpose."""
    return blake3(secret, derive_key_context=purpose).digest()


def domain_of(salt: bytes) -> str:
    """The public id of a salt."""
    return derive(salt, "vmckpt domain id v1")[:16].hex()


def flat(data: bytes | memoryview) -> bytes | memoryview:
    """The same bytes, seen as bytes. Raises ValueError if they do not lie in a row."""
    if isinstance(data, bytes) or (data.format == "B" and data.ndim == 1 and data.contiguous):
        return data
    if not data.c_contiguous:
        raise ValueError("a chunk's bytes do not lie in a row")
    return data.cast("B")


class _Zstd(threading.local):
    """A compressor and a decompressor for each thread: neither may be shared."""

    def __init__(self) -> None:
        self._in = zstandard.ZstdCompressor(level=_LEVEL)
        self._out = zstandard.ZstdDecompressor()

    def pack(self, plain: bytes | memoryview) -> bytes:
        """Compress. Raises ValueError if it is larger than a chunk can be."""
        if len(plain) > MOST:
            raise ValueError(f"{len(plain)} bytes are more than a chunk holds")
        return self._in.compress(plain)

    def unpack(self, packed: bytes | memoryview, digest: bytes, name: bytes) -> bytes:
        """Decompress and compare with the digest. Raises StoreDamaged."""
        try:
            # The frame names its size; memory is taken for no more than a chunk can have.
            if not 0 <= zstandard.frame_content_size(packed) <= MOST:
                raise damaged(name, "it claims a size that no chunk has")
            plain = self._out.decompress(packed, max_output_size=MOST, allow_extra_data=False)
        except zstandard.ZstdError as exc:
            raise damaged(name, "it cannot be decompressed") from exc
        if blake3(plain).digest() != digest:
            raise damaged(name, "its content is not the one it is named for")
        return plain
