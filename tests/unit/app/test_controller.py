"""Which inventory a command gets if none, one or several are named."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from vmckpt.app import controller
from vmckpt.errors import InventoryError
from vmckpt.util import plugins


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one to be in, with nothing that names an inventory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VMCKPT_INVENTORY", raising=False)
    monkeypatch.setattr(plugins, "added", lambda _: iter(()))
    return tmp_path


def written(path: Path, host: str) -> Path:
    path.write_text(f"hosts: {{{host}: {{uri: 'test:///default'}}}}\n")
    return path


def test_what_is_named_goes_before_the_variable_and_that_before_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = written(folder / "named.yaml", "named")
    written(folder / "hosts.yaml", "here")
    assert list(controller.load_inventory().hosts) == ["here"]
    monkeypatch.setenv("VMCKPT_INVENTORY", str(written(folder / "variable.yaml", "variable")))
    assert list(controller.load_inventory().hosts) == ["variable"]
    assert list(controller.load_inventory(named).hosts) == ["named"]


def test_a_package_may_know_one_and_is_asked_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = written(folder / "theirs.yaml", "theirs")

    def added(group: str) -> Iterator[tuple[str, object]]:
        assert group == "vmckpt.inventories"
        yield "knows none", lambda: None
        yield "knows one", lambda: theirs

    monkeypatch.setattr(plugins, "added", added)
    assert controller.inventory_path() == theirs
    assert list(controller.load_inventory().hosts) == ["theirs"]
    written(folder / "hosts.yaml", "here")
    assert list(controller.load_inventory().hosts) == ["here"]


def test_without_any_the_error_says_where_it_was_looked_for(folder: Path) -> None:
    assert controller.inventory_path() is None
    with pytest.raises(InventoryError, match=r"no --inventory, no VMCKPT_INVENTORY, no ./hosts"):
        controller.load_inventory()
    with pytest.raises(InventoryError, match=r"gone\.yaml"):
        controller.load_inventory(folder / "gone.yaml")
