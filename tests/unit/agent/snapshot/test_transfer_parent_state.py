"""A guest's line of snapshots goes along when the guest moves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vmckpt.agent.orders import LineOrder
from vmckpt.agent.snapshot import transfer_parent_state
from vmckpt.errors import BadInput
from vmckpt.model.disk import line_folder
from vmckpt.store import parent_state
from vmckpt.store.format.chunk_map import Kind

Answer = Callable[[str, dict[str, Any]], Any]


class Told:
    """An agent's talk whose answers are made up."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def request(self, what: str, **about: Any) -> Any:
        return self._answer(what, json.loads(json.dumps(about)))


def order(state: Path, *, gives: bool, snapshot: str = "s-1") -> LineOrder:
    made = LineOrder(gives=gives, guest="u-1", store="near", state=str(state), snapshot=snapshot)
    return LineOrder.from_json(json.loads(json.dumps(made.as_json())))


def kept(state: Path, snapshot: str = "s-1", pages: int = 3_000_000) -> Path:
    folder = line_folder(str(state), "u-1", "near")
    with parent_state.Draft(folder) as draft:
        draft.prints("pc.ram", Kind.RAM, 4096 * pages)[7] = np.void(b"p" * 16)
        draft.keep(snapshot, [bytes(32)], {"pc.ram": np.arange(9, dtype=np.uint32)}, {"epoch": 4})
    return folder


def given(state: Path, *, snapshot: str = "s-1", arrives: bool = True) -> list[dict[str, Any]]:
    pieces: list[dict[str, Any]] = []

    def answer(what: str, about: dict[str, Any]) -> bool:
        if what == "piece":
            pieces.append(about)
        return arrives

    channel: Any = Told(answer)
    transfer_parent_state.move(order(state, gives=True, snapshot=snapshot), channel)
    return pieces


def taken(state: Path, pieces: list[dict[str, Any]], snapshot: str = "s-1") -> dict[str, Any]:
    left = [*pieces, None]
    channel: Any = Told(lambda *_: left.pop(0))
    return transfer_parent_state.move(order(state, gives=False, snapshot=snapshot), channel)


def ends_with(folder: Path) -> str | None:
    """Which snapshot a line ends with; None if there is no line."""
    found = parent_state.load(folder)
    return None if found is None else found.snapshot


def test_a_line_moves_whole(tmp_path: Path) -> None:
    old = kept(tmp_path / "old")
    before = kept(tmp_path / "new", "s-0")
    pieces = given(tmp_path / "old")
    assert len(pieces) > 10
    assert not old.exists()
    assert taken(tmp_path / "new", pieces) == {"moved": True}
    found = parent_state.load(before)
    assert found is not None
    assert (found.snapshot, found.extra) == ("s-1", {"epoch": 4})
    prints = found.regions["pc.ram"].prints
    assert prints is not None
    assert bytes(prints[7]) == b"p" * 16
    assert [path.name for path in before.parent.iterdir()] == [before.name]


def test_it_stays_until_it_has_arrived(tmp_path: Path) -> None:
    old = kept(tmp_path / "old", pages=10)
    given(tmp_path / "old", arrives=False)
    assert ends_with(old) == "s-1"


def test_another_snapshots_line_is_not_given(tmp_path: Path) -> None:
    kept(tmp_path / "old", "s-7", pages=10)
    assert given(tmp_path / "old", arrives=False) == []
    assert given(tmp_path / "nowhere", arrives=False) == []


@pytest.mark.parametrize("lost", ["0.prints", "chunks", "line.json"])
def test_what_did_not_come_whole_is_thrown_away(tmp_path: Path, lost: str) -> None:
    kept(tmp_path / "old", pages=10)
    there = kept(tmp_path / "new", "s-0", pages=10)
    pieces = [one for one in given(tmp_path / "old") if one["name"] != lost]
    assert taken(tmp_path / "new", pieces) == {"moved": False}
    assert ends_with(there) == "s-0"
    assert list(there.parent.iterdir()) == [there]


@pytest.mark.parametrize(
    "piece",
    [
        {"name": "../../etc/cron.d/x", "data": "KLUv/QBYAQAAaA=="},
        {"name": "chunks", "data": "not base64"},
        {"name": "chunks", "data": "AAAA"},
        {"name": "chunks"},
    ],
)
def test_nonsense_is_refused(tmp_path: Path, piece: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="parent state"):
        taken(tmp_path, [piece])
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []
