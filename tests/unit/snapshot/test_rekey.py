"""Snapshots that are made to open for other keys."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from tests.fixtures.make_store_v1 import ALICE
from tests.support.stocking import Stock, stocked
from vmckpt.errors import KeyRefused
from vmckpt.snapshot import rekey
from vmckpt.snapshot.rekey import Rotated
from vmckpt.store.keys import wrapped_keys
from vmckpt.store.keys.identity import public_of

BOB, CAROL = X25519PrivateKey.generate(), X25519PrivateKey.generate()


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    made = stocked(tmp_path, monkeypatch, capsys)
    made.encrypt()
    return made


def rotated(stock: Stock, identity: X25519PrivateKey = ALICE, *, dry_run: bool = False) -> Rotated:
    return rekey.rotate(
        stock.store(), identity, [public_of(BOB)], stock.ring.trusted(), dry_run=dry_run
    )


def opens(stock: Stock, id_: str, identity: X25519PrivateKey) -> bytes | None:
    """The data key; None: it is not for this identity."""
    wrapped = stock.store().wraps(id_)
    assert wrapped is not None
    try:
        return wrapped_keys.unwrap(wrapped, id_, identity)
    except KeyRefused:
        return None


def test_the_same_data_key_opens_for_the_new_ones_and_no_others(stock: Stock) -> None:
    one = stock.put("one", [1])
    before, manifest = opens(stock, one, ALICE), stock.store().manifest(one)
    told = rotated(stock)

    assert told.rewrapped == (one,)
    assert opens(stock, one, BOB) == before
    assert opens(stock, one, ALICE) is None
    assert stock.store().manifest(one) == manifest


def test_a_dry_run_changes_nothing(stock: Stock) -> None:
    one = stock.put("one", [1])
    before = stock.store().wraps(one)

    assert rotated(stock, dry_run=True).rewrapped == (one,)
    assert stock.store().wraps(one) == before


def test_what_this_identity_does_not_open_stays_as_it_is(stock: Stock) -> None:
    one = stock.put("one", [1])
    before = stock.store().wraps(one)
    told = rotated(stock, CAROL)

    assert (told.rewrapped, set(told.refused)) == ((), {one})
    assert "is not encrypted for this identity" in told.refused[one]
    assert stock.store().wraps(one) == before


def test_a_key_that_somebody_else_wrapped_for_us_takes_no_place(stock: Stock) -> None:
    one = stock.put("one", [1])
    stock.store().put_wraps(one, wrapped_keys.wrap(bytes(32), one, [public_of(ALICE)]))
    told = rotated(stock)

    assert (told.rewrapped, set(told.damaged)) == ((), {one})
    assert "a different data key" in told.damaged[one]
    assert opens(stock, one, BOB) is None
