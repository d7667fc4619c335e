"""What other packages add is found by its group and loaded by its name."""

from pathlib import Path

import pytest

from vmckpt.util import plugins


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with two entry points of ours, and one of another's."""
    about = tmp_path / "extra-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[vmckpt.tried]\nones = vmckpt_extra:ONES\ngone = vmckpt_extra:NOTHING\n"
        "[other.tried]\ntwos = vmckpt_extra:ONES\n"
    )
    (tmp_path / "vmckpt_extra.py").write_text("ONES = [1, 1]\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("package")
def test_each_is_loaded_when_it_comes_and_others_are_not() -> None:
    found = plugins.added("vmckpt.tried")
    assert next(found) == ("ones", [1, 1])
    with pytest.raises(AttributeError, match="NOTHING"):
        next(found)


def test_where_nothing_is_added_there_is_nothing() -> None:
    assert list(plugins.added("vmckpt.tried")) == []
