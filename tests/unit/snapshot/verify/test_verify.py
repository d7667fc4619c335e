"""Snapshots bit by bit: what is wrong, and who needs it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.make_store_v1 import ALICE, secret
from tests.support.snapshots import bare, ram
from tests.support.stocking import Stock, flip, stocked
from vmckpt.errors import KeyRefused, StoreDamaged
from vmckpt.snapshot.verify import verify
from vmckpt.snapshot.verify.verify import Depth, Proved, misfits
from vmckpt.store.format.metadata import Part
from vmckpt.store.keys.keyring import OwnKey


def test_maps_that_do_not_fit_their_chunks_are_found() -> None:
    kept = bare([ram([0, 1, -1, 64])], [b"a" * 32, b"b" * 32])
    lengths = np.array([8192, 4096], dtype=np.uint32)
    assert list(misfits(kept, lengths)) == []
    assert list(misfits(kept, lengths // 2)) == [
        "the map of pc.ram points outside the chunk for 2 units"
    ]
    assert list(misfits(kept, np.array([8192, 5000], dtype=np.uint32))) == [
        "the map of pc.ram points outside the chunk for 1 unit"
    ]
    assert list(misfits(kept, np.array([8192, 0], dtype=np.uint32))) == []
    part = replace(kept.facts, stream=(Part(name="tail", size=4095, chunks=(1,)),))
    assert list(misfits(replace(kept, facts=part), lengths)) == [
        'part "tail" of the migration stream differs in length from its chunks'
    ]


def proved(stock: Stock, *ids: str, depth: Depth = Depth.SEALED, key: bool = True) -> Proved:
    identity = (lambda: ALICE) if key else None
    return verify.prove(stock.store(), ids, depth, trusted=stock.ring.trusted(), identity=identity)


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    made = stocked(tmp_path, monkeypatch, capsys)
    made.encrypt()
    return made


@pytest.mark.parametrize("depth", Depth)
def test_a_good_store_has_no_flaws_and_each_depth_looks_further(stock: Stock, depth: Depth) -> None:
    ids = {stock.put("one", [1, 2]), stock.put("two", [2, 3])}
    found = proved(stock, depth=depth)

    found.check()
    assert (found.flaws, set(found.ids), found.snapshots) == ((), ids, 2)
    assert found.opened == (0 if depth is Depth.SEALED else 2)
    assert (found.chunks > 0) is (depth is Depth.DEEP)
    assert found.as_json()["good"] is True


def test_a_flipped_bit_is_told_with_its_pack_and_who_needs_it(stock: Stock) -> None:
    one = stock.put("one", [1, 2, 3])
    (pack,) = stock.packs()
    flip(pack, 60)
    found = proved(stock, one)

    flaw = next(flaw for flaw in found.flaws if flaw.key.startswith("packs/"))
    assert flaw.key.endswith(pack.name)
    assert flaw.snapshots == (one,)
    with pytest.raises(StoreDamaged):
        found.check()


def test_without_the_key_snapshots_stay_closed_and_that_is_said(stock: Stock) -> None:
    one = stock.put("one", [1])
    found = proved(stock, depth=Depth.DEEP, key=False)

    assert found.flaws == ()
    assert found.closed == {one: "it is encrypted, and no identity was given"}
    with pytest.raises(KeyRefused, match="could not open"):
        found.check()
    proved(stock, depth=Depth.OPENED, key=False).check()


def test_what_a_stranger_signed_is_a_flaw_and_is_not_opened(stock: Stock) -> None:
    one = stock.put("one", [1], signer=OwnKey(secret("a stranger")))
    found = proved(stock, depth=Depth.DEEP)

    assert [(flaw.key, flaw.kind) for flaw in found.flaws] == [(f"snapshots/{one}", KeyRefused)]
    assert found.opened == 0
