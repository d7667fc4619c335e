import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures import hpke
from tests.support.snapshots import ID
from vmckpt.errors import KeyRefused, StoreDamaged, StoreNewer
from vmckpt.store.keys import wrapped_keys
from vmckpt.store.keys.identity import public_of
from vmckpt.store.keys.key_files import fingerprint, key_id
from vmckpt.store.keys.wrapped_keys import recipients, unwrap, wrap

DATA_KEY = bytes(range(32))
ALICE, BOB, EVE = (X25519PrivateKey.from_private_bytes(bytes([one]) * 32) for one in (1, 2, 3))
FOR_BOTH = wrap(DATA_KEY, ID, [public_of(ALICE), public_of(BOB)])


def test_each_administrator_can_unwrap_and_nobody_else() -> None:
    assert unwrap(FOR_BOTH, ID, ALICE) == unwrap(FOR_BOTH, ID, BOB) == DATA_KEY
    with pytest.raises(
        KeyRefused, match=rf"{ID} is not encrypted for this identity \(key [0-9a-f]{{32}}\)"
    ):
        unwrap(FOR_BOTH, ID, EVE)


def test_for_whom_it_is_can_be_told_without_a_key() -> None:
    both = {fingerprint(public_of(ALICE)), fingerprint(public_of(BOB))}

    assert set(recipients(FOR_BOTH, ID)) == both


def test_wraps_are_of_no_use_beside_another_snapshot() -> None:
    other = "s-zzzzzzzzzzzzzzzz"
    with pytest.raises(
        KeyRefused, match=f"the wrap for this identity in wraps/{other} belongs to another snapshot"
    ):
        unwrap(FOR_BOTH, other, ALICE)


def test_two_wraps_of_one_key_have_nothing_in_common() -> None:
    assert (
        wrap(DATA_KEY, ID, [public_of(ALICE)])[28:] != wrap(DATA_KEY, ID, [public_of(ALICE)])[28:]
    )


@pytest.mark.parametrize("count", [0, 257])
def test_there_must_be_some_administrators_and_not_too_many(count: int) -> None:
    with pytest.raises(KeyRefused, match=f"1 to 256 administrators' keys, not {count}"):
        wrap(DATA_KEY, ID, [number.to_bytes(32, "big") for number in range(count)])


def test_the_same_key_twice_is_wrapped_once() -> None:
    assert len(recipients(wrap(DATA_KEY, ID, [public_of(ALICE)] * 2), ID)) == 1


def test_the_most_that_can_be_made_can_be_read() -> None:
    most = [public_of(ALICE), *((9 + one).to_bytes(32, "little") for one in range(255))]
    data = wrap(DATA_KEY, ID, most)

    assert len(data) == 12 + 256 * 96 + 32
    assert unwrap(data, ID, ALICE) == DATA_KEY


def test_every_flipped_bit_is_refused_as_damage() -> None:
    for bit in range(len(FOR_BOTH) * 8):
        data = bytearray(FOR_BOTH)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreDamaged, match=f"^wraps/{ID}: "):
            unwrap(bytes(data), ID, ALICE)


@given(st.binary(max_size=300))
def test_noise_is_refused_as_damage(data: bytes) -> None:
    for tried in (data, wrapped_keys.MAGIC + data, FOR_BOTH[: len(data)]):
        with pytest.raises(StoreDamaged):
            recipients(tried, ID)


@given(st.binary(min_size=80, max_size=80) | st.binary(min_size=48, max_size=48).map(
    lambda rest: bytes(32) + rest))  # fmt: skip
def test_a_wrap_that_somebody_made_up_is_refused(box: bytes) -> None:
    data = wrapped_keys.put_together([(key_id(public_of(ALICE)), box)])

    with pytest.raises(KeyRefused, match="belongs to another snapshot"):
        unwrap(data, ID, ALICE)


def test_a_newer_version_is_named() -> None:
    body = bytearray(FOR_BOTH[:-32])
    body[8] = 2

    with pytest.raises(
        StoreNewer, match=f"wraps/{ID} has version 2; this vmckpt supports versions up to 1"
    ):
        recipients(bytes(body) + blake3(body).digest(), ID)


def test_what_the_rfc_says_is_what_the_library_reads() -> None:
    box = hpke.seal(DATA_KEY, public_of(BOB), wrapped_keys.info(ID), bytes(range(32)))

    data = wrapped_keys.put_together([(key_id(public_of(BOB)), box)])

    assert unwrap(data, ID, BOB) == DATA_KEY
