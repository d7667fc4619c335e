import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.snapshots import ID, KEYS, OPEN, PUBLIC, TRUSTED, bare, maps, private, ram
from vmckpt.errors import KeyRefused, StoreDamaged, StoreError, StoreNewer
from vmckpt.store.format.chunk_map import UNIT, Kind
from vmckpt.store.format.manifest import (
    MAGIC,
    Keys,
    data_key_id,
    decode,
    encode,
    is_for,
    references,
    signed,
)
from vmckpt.store.format.metadata import Contents, Part, Public
from vmckpt.store.format.private_part import Private, RegionMap
from vmckpt.store.format.sealing import derive
from vmckpt.store.keys.keyring import OwnKey
from vmckpt.units import Bytes

BOTH = pytest.mark.parametrize("keys", [OPEN, KEYS], ids=["plain", "encrypted"])
WORDS = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=60)
PUBLICS = st.builds(
    Public,
    id=st.just(ID), name=WORDS, guest=WORDS, guest_uuid=st.uuids().map(str),
    contents=st.sampled_from(Contents), made_at=st.floats(0, 2**39), by=WORDS, host=WORDS,
    parent=st.none() | st.just("s-bbbbbbbbbbbbbbbb"), group=st.none(),
    memory=st.integers(0, 2**63 - 1), disks=st.integers(0, 2**40), new=st.integers(0, 2**40),
    qemu=WORDS, machine=WORDS, accelerator=WORDS, arch=WORDS, epoch=st.integers(0, 2**40),
    owner=WORDS, tags=st.dictionaries(WORDS, WORDS, max_size=5),
)  # fmt: skip


@st.composite
def privates(draw: st.DrawFn) -> Private:
    count = draw(st.integers(0, 6))
    chunks = [derive(bytes([number]), "test") for number in range(count)]
    names = draw(st.lists(WORDS, max_size=3, unique=True))
    regions = []
    for name in names:
        kind, map_ = draw(st.sampled_from(Kind)), draw(maps(count, 40))
        short = draw(st.integers(0, UNIT[kind] - 1)) if len(map_) else 0
        size = Bytes(len(map_) * UNIT[kind] - short)
        regions.append(RegionMap(name=name, kind=kind, size=size, map=map_))
    files = draw(st.dictionaries(WORDS, st.binary(max_size=99), max_size=3))
    return bare(regions, chunks, files)


def same(one: Private, other: Private) -> bool:
    def told(private: Private) -> object:
        rows = [(one.name, one.kind, one.size, one.map.tolist()) for one in private.regions]
        return private.facts, list(private.chunks), rows, dict(private.files)

    return told(one) == told(other)


def resealed(body: bytes, keys: Keys = KEYS) -> bytes:
    """What a writer with a key of its own could publish."""
    signature = keys.signing.sign(signed(ID, blake3(body).digest()))
    return body + signature + blake3(body + signature).digest()


@BOTH
@settings(max_examples=60)
@given(public=PUBLICS, kept=privates())
def test_a_manifest_comes_back_as_it_was(keys: Keys, public: Public, kept: Private) -> None:
    data = encode(public, kept, keys)
    told = decode(data, ID, TRUSTED)

    filled = told.public
    assert filled == replace(
        public, domain=filled.domain, signer=filled.signer, private_hash=filled.private_hash,
        data_key_id=filled.data_key_id,
    )  # fmt: skip
    assert same(told.private(keys.data_key), kept)
    assert told.encrypted == (keys.data_key is not None)
    assert data == encode(public, kept, keys)
    assert list(references(data)) == sorted(map(keys.sealing().name_of, kept.chunks))


@BOTH
def test_every_flipped_bit_is_refused_as_damage(keys: Keys) -> None:
    data = encode(PUBLIC, private(keys.sealing()), keys)
    for bit in range(len(data) * 8):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreDamaged, match=f"^snapshots/{ID}: [^\n]*$"):
            decode(bytes(wrong), ID, TRUSTED)
        with pytest.raises(StoreDamaged):
            references(bytes(wrong))


@BOTH
def test_every_flipped_bit_is_refused_even_if_the_checksum_was_made_to_fit(keys: Keys) -> None:
    data = encode(PUBLIC, private(keys.sealing()), keys)
    for bit in range((len(data) - 32) * 8):
        wrong = bytearray(data[:-32])
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises((StoreDamaged, StoreNewer, KeyRefused)):
            decode(bytes(wrong) + blake3(wrong).digest(), ID, TRUSTED)


@BOTH
def test_whatever_a_writer_signs_is_read_or_refused(keys: Keys) -> None:
    data = encode(PUBLIC, private(keys.sealing()), keys)
    for bit in range(0, (len(data) - 96) * 8, 5):  # each byte, and each bit of some
        wrong = bytearray(data[:-96])
        wrong[bit // 8] ^= 1 << bit % 8
        try:
            decode(resealed(bytes(wrong)), ID, TRUSTED).private(keys.data_key)
        except (StoreDamaged, StoreNewer, KeyRefused) as refused:
            assert "\n" not in str(refused)  # noqa: PT017
            assert len(str(refused)) < 400  # noqa: PT017


@given(st.binary(max_size=400), st.integers(0, 3))
def test_noise_is_refused_as_damage(noise: bytes, version: int) -> None:
    head = MAGIC + version.to_bytes(2, "little")
    for data in (noise, head + noise, resealed(noise), resealed(head + noise)):
        with pytest.raises((StoreDamaged, StoreNewer)):
            decode(data, ID, None)


def test_a_newer_version_is_named_and_a_damaged_one_is_not_taken_for_it() -> None:
    body = bytearray(encode(PUBLIC, private(OPEN.sealing()), OPEN)[:-96])
    body[8] = 2

    with pytest.raises(
        StoreNewer, match=f"{ID} has version 2; this vmckpt supports versions up to 1; use"
    ):
        decode(resealed(bytes(body)), ID, None)
    with pytest.raises(StoreNewer):
        references(resealed(bytes(body)), ID)
    with pytest.raises(StoreDamaged, match="checksum"):
        decode(bytes(body) + bytes(96), ID, None)


def test_only_a_writer_that_is_trusted_is_believed() -> None:
    stranger = Keys(OwnKey(bytes(32)), KEYS.salt, KEYS.data_key)
    data = encode(PUBLIC, private(KEYS.sealing()), stranger)

    with pytest.raises(
        KeyRefused, match=r"not trusted here; .* keys trust NAME vmckpt-writer-pub:"
    ):
        decode(data, ID, TRUSTED)
    assert decode(data, ID, None).public.name == PUBLIC.name


def test_a_signature_by_another_key_than_the_one_it_names_is_refused() -> None:
    body = encode(PUBLIC, private(KEYS.sealing()), KEYS)[:-96]
    stranger = Keys(OwnKey(bytes(32)))

    with pytest.raises(StoreDamaged, match="its signature is wrong"):
        decode(resealed(body, stranger), ID, None)


def test_who_signs_for_a_host_can_tell_what_for() -> None:
    message = signed(ID, bytes(32))

    assert is_for(message, ID)
    assert not is_for(message, "s-zzzzzzzzzzzzzzzz")
    assert not is_for(message + b"x", ID)
    assert not is_for(message[:-1], ID)
    assert not is_for(b"x" + message[1:], ID)


def test_a_signer_that_gives_nothing_leaves_no_manifest() -> None:
    class Mute(OwnKey):
        def sign(self, message: bytes) -> bytes:
            return message[:0]

    with pytest.raises(KeyRefused, match=f"snapshot {ID} was not signed"):
        encode(PUBLIC, private(OPEN.sealing()), Keys(Mute(bytes(32))))


def test_a_manifest_in_anothers_place_is_refused() -> None:
    data = encode(PUBLIC, private(OPEN.sealing()), OPEN)

    with pytest.raises(StoreDamaged, match=f"snapshots/s-zzzzzzzzzzzzzzzz: it is the .* of {ID}"):
        decode(data, "s-zzzzzzzzzzzzzzzz", TRUSTED)


def test_without_its_data_key_the_private_part_stays_closed() -> None:
    told = decode(encode(PUBLIC, private(KEYS.sealing()), KEYS), ID, TRUSTED)

    with pytest.raises(KeyRefused, match="is encrypted; give an identity file with --identity"):
        told.private()
    with pytest.raises(KeyRefused, match="belongs to another snapshot"):
        told.private(bytes(32))


def test_nothing_of_the_guest_shows_without_a_key() -> None:
    kept = private(KEYS.sealing())
    data = encode(PUBLIC, kept, KEYS)
    assert KEYS.salt is not None
    assert KEYS.data_key is not None

    for secret in (KEYS.salt, KEYS.data_key, KEYS.salt.hex().encode(), b"<domain>", *kept.chunks):
        assert secret not in data
    assert repr(KEYS.data_key) not in repr(KEYS)


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        pytest.param(lambda p: replace(p, facts=replace(
            p.facts, stream=(Part(name="tail", size=1, chunks=(9,)),))), "that is not in the table",
            id="stream"),
        pytest.param(lambda p: replace(p, facts=replace(
            p.facts, stream=(Part(name="tail", size=1 << 30, chunks=(1,)),))), "larger than",
            id="long stream"),
        pytest.param(lambda p: replace(p, regions=p.regions * 2), "it has two regions named",
            id="region twice"),
        pytest.param(lambda p: replace(p, chunks=p.chunks[:1]), "not in the table", id="map"),
        pytest.param(lambda p: replace(p, regions=(replace(p.regions[0], size=Bytes(4096)),)),
            "does not match the region", id="size"),
        pytest.param(lambda p: replace(p, chunks=[b"short"]), "", id="digest"),
        pytest.param(lambda p: replace(p, facts=replace(p.facts, domain_xml="\ud800")), "",
            id="surrogate"),
        pytest.param(lambda p: replace(p, facts=replace(p.facts, warnings=("a\x1b[2J",))),
            "warnings.0", id="control"),
        pytest.param(lambda p: replace(p, files={"a": bytes(65 << 20)}), "too large", id="file"),
    ],
)  # fmt: skip
def test_what_could_not_be_read_back_is_not_written(
    broken: Callable[[Private], Private], what: str
) -> None:
    with pytest.raises(StoreError, match=f"^cannot write snapshot {ID}: [^\n]*{what}"):
        encode(PUBLIC, broken(private(OPEN.sealing())), OPEN)


def test_chunks_that_are_not_among_the_names_are_refused() -> None:
    """Else a collection would take what the snapshot needs."""
    data = encode(PUBLIC, private(OPEN.sealing()), OPEN)
    told = int.from_bytes(data[12:16], "little")
    fewer = bytearray(data[: 32 + told] + data[32 + told + 32 : -96])
    fewer[16:24] = (3 * 32).to_bytes(8, "little")

    with pytest.raises(StoreDamaged, match="its chunks do not match its list of names"):
        decode(resealed(bytes(fewer)), ID, TRUSTED).private()


def test_a_chunk_under_another_name_is_refused() -> None:
    data = encode(PUBLIC, private(OPEN.sealing()), OPEN)
    told, named = (int.from_bytes(data[at : at + 4], "little") for at in (12, 16))
    other = bytearray(data[:-96])
    other[32 + told + named - 1] ^= 1

    with pytest.raises(StoreDamaged, match="its chunks do not match its list of names"):
        decode(resealed(bytes(other), OPEN), ID, TRUSTED).private()


@BOTH
def test_another_private_part_is_refused_before_it_is_opened(keys: Keys) -> None:
    """Also if the writer has signed it: readers without a key know it by its hash."""
    other = bytearray(encode(PUBLIC, private(keys.sealing()), keys)[:-96])
    other[-1] ^= 1

    with pytest.raises(StoreDamaged, match="its private part belongs to another snapshot"):
        decode(resealed(bytes(other), keys), ID, TRUSTED)


def test_a_large_guest_is_written_and_read_in_little_more_than_its_maps() -> None:
    count = 1 << 21  # 8 GiB
    region = ram([0])
    chunks = [derive(number.to_bytes(4, "big"), "test") for number in range(count // 64)]
    region = replace(
        region, size=Bytes(count * 4096),
        map=np.arange(count, dtype=np.uint32),
    )  # fmt: skip
    data = encode(PUBLIC, bare([region], chunks), KEYS)
    tracemalloc.start()
    kept = decode(data, ID, TRUSTED).private(KEYS.data_key)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert len(data) < 64 * len(chunks) + 20000
    assert (kept.regions[0].map == region.map).all()
    assert peak < 4 * count + (32 << 20)


def test_the_id_of_a_data_key_says_nothing_of_it() -> None:
    assert data_key_id(bytes(32)) != data_key_id(bytes([1]) + bytes(31))
    assert len(data_key_id(bytes(32))) == 32
