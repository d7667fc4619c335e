"""Searching names, and packs as bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmckpt.store.chunk_index import Index, NameSet, PackInfo, names_of
from vmckpt.store.format import pack as format_pack

# Few beginnings: names that share their first eight bytes are what a guest can make.
NAMES = st.builds(
    lambda head, tail: bytes([head]) * 8 + bytes([tail]) * 24, st.integers(0, 3), st.integers(0, 9)
)


@given(st.lists(st.lists(NAMES, max_size=12), max_size=12), st.sets(st.integers(0, 11)))
@settings(max_examples=150)
def test_the_index_tells_what_a_dict_would(stored: list[list[bytes]], gone: set[int]) -> None:
    index, truth = Index(), {}
    for number, names in enumerate(stored):
        data = format_pack.encode(
            [(name, name[-1:] * 5, 5) for name in names], bytes([number]) * 16
        )
        info = PackInfo(f"{number:064x}", 0, len(data))
        index.add(info, format_pack.parse_tail(data, len(data)).rows)
        truth[info.id] = set(names)
    for number in gone:
        truth.pop(f"{number:064x}", None)
    for run in index.runs:
        run.use_only(set(truth))

    asked = sorted({name for names in stored for name in names} | {b"\0" * 8 + b"x" * 24})
    expected = [{pack for pack, names in truth.items() if one in names} for one in asked]
    assert [{place.pack for place in index.places(one)} for one in asked] == expected
    assert index.has(names_of(asked)).tolist() == [bool(one) for one in expected]
    assert set(index.packs()) == set(truth)


@given(st.lists(st.lists(NAMES, max_size=30), max_size=5), st.lists(NAMES, max_size=30))
@settings(max_examples=100)
def test_a_set_of_names_has_each_once(parts: list[list[bytes]], asked: list[bytes]) -> None:
    names = NameSet([names_of(one) for one in parts])
    truth = {name for part in parts for name in part}

    assert sorted(one.tobytes() for one in names.names) == sorted(truth)
    assert (names.positions(names_of(asked)) >= 0).tolist() == [one in truth for one in asked]


@pytest.mark.parametrize(("large", "few"), [(1 << 16, 10), (100, 15)])
def test_runs_stay_few(monkeypatch: pytest.MonkeyPatch, large: int, few: int) -> None:
    monkeypatch.setattr("vmckpt.store.chunk_index._BLOCK", 7)
    monkeypatch.setattr("vmckpt.store.chunk_index._LARGE", large)
    index = Index()
    stored: dict[bytes, str] = {}
    rng = np.random.default_rng(3)
    for number in range(200):
        boxes = [(rng.bytes(32), b"", 1) for _ in range(number % 7)]
        stored |= {name: f"{number:064x}" for name, _, _ in boxes}
        data = format_pack.encode(boxes, bytes(16))
        index.add(PackInfo(f"{number:064x}", 0, 1), format_pack.parse_tail(data, len(data)).rows)
    assert len(index.runs) < few
    assert len(index.packs()) == 200
    assert {name: [one.pack for one in index.places(name)] for name in stored} == {
        name: [pack] for name, pack in stored.items()
    }
