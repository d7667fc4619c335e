"""What a store that lies can do with snapshots, and what it cannot."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.stocking import Stock, stocked

LISTED = "cut-1", "cut-2"


@pytest.fixture(params=[True, False], ids=["encrypted", "plain"])
def stock(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Stock:  # fmt: skip
    made = stocked(tmp_path, monkeypatch, capsys)
    if request.param:
        made.encrypt()
    for number, name in enumerate(LISTED):
        made.put(name, [1, 2, 3, 4, 10 + number])
    return made


def manifests(stock: Stock) -> list[Path]:
    return [stock.folder / "near" / "snapshots" / stock_id for stock_id in ids(stock)]


def ids(stock: Stock) -> list[str]:
    return [one.id for one in stock.store().manifests()]


def verified(stock: Stock) -> tuple[int, str]:
    key = ["--identity", str(stock.identity("alice"))] if stock.ring.encrypts else []
    code, out, err = stock("verify", "--deep", "--store", "near", *key)
    return code, out + err


def _swapped(one: Path, other: Path) -> None:
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def _twice(one: Path, other: Path) -> None:
    other.write_bytes(one.read_bytes())


@pytest.mark.parametrize("lie", [_swapped, _twice])
def test_no_snapshot_passes_for_another(stock: Stock, lie: Callable[[Path, Path], None]) -> None:
    assert verified(stock)[0] == 0
    lie(*manifests(stock))
    code, said = verified(stock)
    assert code == 41
    assert "it is the manifest of" in said


def test_one_snapshots_memory_never_comes_out_of_another_ones_pack(stock: Stock) -> None:
    """Packs are called by their content, chunks by the snapshot that its writer signed."""
    one, other = stock.packs()[:2]
    _swapped(one, other)
    code, said = verified(stock)
    assert code == 41
    assert one.name[:8] in said or other.name[:8] in said


def test_keys_of_another_snapshot_open_nothing(stock: Stock) -> None:
    if not stock.ring.encrypts:
        assert not (stock.folder / "near" / "wraps").exists()
        return
    _swapped(*(stock.folder / "near" / "wraps" / one for one in ids(stock)))
    code, said = verified(stock)
    assert code == 41
    assert "wraps/" in said


def test_a_store_can_lose_a_snapshot_and_is_not_believed_that_it_has_it(stock: Stock) -> None:
    """What it removes is gone: only another store has it then."""
    gone, kept = manifests(stock)
    gone.unlink()
    assert ids(stock) == [kept.name]
    code, _, err = stock("show", gone.name, "--store", "near")
    assert code != 0
    assert gone.name in err
    assert verified(stock)[0] == 0


def test_a_store_that_goes_back_in_time_is_taken_for_what_it_was(
    stock: Stock, tmp_path: Path
) -> None:
    """A limit: nothing outside the store knows which snapshots it must have."""
    shutil.copytree(tmp_path / "near", tmp_path / "then")
    newest = stock.put("cut-3", [1, 2, 3, 4, 99])
    shutil.rmtree(tmp_path / "near")
    (tmp_path / "then").rename(tmp_path / "near")
    assert verified(stock)[0] == 0
    assert newest not in ids(stock)
    assert stock("show", newest, "--store", "near")[0] != 0
