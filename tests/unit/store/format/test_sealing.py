import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.errors import KeyRefused, StoreDamaged
from vmckpt.store.format.sealing import MOST, Encrypted, Plain, Sealing, derive

SALT, OTHER = bytes(range(32)), bytes(32)
KINDS: list[Callable[[], Sealing]] = [Plain, lambda: Encrypted(SALT)]
BOTH = pytest.mark.parametrize("make", KINDS, ids=["plain", "encrypted"])


class Sealed(NamedTuple):
    digest: bytes
    name: bytes
    box: bytes


def sealed(sealing: Sealing, plain: bytes | memoryview) -> Sealed:
    digest = sealing.digest_of(plain)
    return Sealed(digest, sealing.name_of(digest), sealing.seal(plain, digest))


@BOTH
@given(data=st.binary(max_size=5000))
def test_what_is_sealed_is_unsealed(make: Callable[[], Sealing], data: bytes) -> None:
    sealing = make()
    chunk = sealed(sealing, data)

    assert sealing.unseal(chunk.box, chunk.digest) == data
    assert sealing.unseal(memoryview(chunk.box), chunk.digest) == data


@BOTH
def test_the_same_content_makes_the_same_box(make: Callable[[], Sealing]) -> None:
    assert sealed(make(), b"page" * 9000) == sealed(make(), b"page" * 9000)


@BOTH
def test_numbers_of_any_width_are_taken_as_bytes(make: Callable[[], Sealing]) -> None:
    rows = np.arange(4096, dtype=np.uint64).reshape(8, -1)

    assert sealed(make(), rows.data) == sealed(make(), rows.tobytes())
    with pytest.raises(ValueError, match="not contiguous"):
        make().digest_of(rows[:, ::2].data)


@BOTH
def test_every_flipped_bit_of_a_box_is_refused(make: Callable[[], Sealing]) -> None:
    sealing = make()
    chunk = sealed(sealing, bytes(range(97)) * 3)
    taken = []
    for bit in range(len(chunk.box) * 8):
        box = bytearray(chunk.box)
        box[bit // 8] ^= 1 << bit % 8
        try:
            plain = sealing.unseal(bytes(box), chunk.digest)
        except StoreDamaged:
            continue
        taken.append(plain)

    # zstd's frame has bits that mean nothing; a plain box may differ in those, the content may not.
    assert set(taken) <= {bytes(range(97)) * 3}
    assert not taken or isinstance(sealing, Plain)


@BOTH
@pytest.mark.parametrize("box", [b"", b"x", bytes(100), os.urandom(5000)])
def test_what_is_no_box_is_refused_in_one_line(make: Callable[[], Sealing], box: bytes) -> None:
    with pytest.raises(StoreDamaged, match=r"^chunk [0-9a-f]{16}: [^\n]*$"):
        make().unseal(box, SALT)


def test_a_box_that_claims_to_be_huge_takes_no_memory() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(MOST + 1))
    unsaid = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))

    for box in (bomb, unsaid):
        with pytest.raises(StoreDamaged, match="its stated size is invalid"):
            Plain().unseal(box, blake3(bytes(100)).digest())
    with pytest.raises(ValueError, match="too many for one chunk"):
        Plain().seal(bytes(MOST + 1), SALT)


def test_another_content_under_a_digest_is_refused_although_it_was_sealed_with_the_key() -> None:
    sealing = Encrypted(SALT)
    forged = sealing.seal(b"something else", sealing.digest_of(b"what was meant"))

    with pytest.raises(StoreDamaged, match="does not match its digest"):
        sealing.unseal(forged, sealing.digest_of(b"what was meant"))


def test_domains_share_neither_names_nor_boxes_nor_ids() -> None:
    one, two, open_ = sealed(Encrypted(SALT), b"x"), sealed(Encrypted(OTHER), b"x"), Plain()

    assert one.digest == two.digest == open_.digest_of(b"x")
    assert len({one.name, two.name, open_.name_of(one.digest)}) == 3
    assert len({one.box, two.box, open_.seal(b"x", one.digest)}) == 3
    assert len({Encrypted(SALT).domain, Encrypted(OTHER).domain, open_.domain}) == 3
    with pytest.raises(StoreDamaged):
        Encrypted(OTHER).unseal(one.box, one.digest)


def test_the_boxes_are_those_that_the_formats_document_describes() -> None:
    plain = b"content" * 100
    digest = blake3(plain).digest()
    name = blake3(
        digest, key=blake3(SALT, derive_key_context="vmckpt chunk name v1").digest()
    ).digest()
    key = blake3(
        digest, key=blake3(SALT, derive_key_context="vmckpt chunk key v1").digest()
    ).digest()
    packed = zstandard.ZstdCompressor(level=3).compress(plain)

    assert sealed(Plain(), plain) == sealed(Plain(), bytes(plain))
    assert sealed(Plain(), plain).box == packed
    made = sealed(Encrypted(SALT), plain)
    assert (made.digest, made.name) == (digest, name)
    nonce = blake3(packed, key=derive(key, "vmckpt chunk nonce v1")).digest()[:12]
    assert made.box == nonce + AESGCM(key).encrypt(nonce, packed, name)
    assert derive(SALT, "a") != derive(SALT, "b")


def test_a_salt_of_a_wrong_length_is_refused() -> None:
    with pytest.raises(KeyRefused, match="must have 32 bytes, not 31"):
        Encrypted(bytes(31))


@BOTH
def test_many_threads_seal_and_unseal_at_once(make: Callable[[], Sealing]) -> None:
    sealing, barrier = make(), threading.Barrier(4)

    def work(number: int) -> bool:
        barrier.wait(10)
        chunks = [bytes([number, turn]) * 30000 for turn in range(20)]
        boxes = [sealed(sealing, chunk) for chunk in chunks]
        return all(
            sealing.unseal(box.box, box.digest) == chunk
            for box, chunk in zip(boxes, chunks, strict=True)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
