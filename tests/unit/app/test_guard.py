"""A guard is refused before anything is done if there would be no way back."""

from pathlib import Path

import pytest

from tests.support.stocking import stocked
from vmckpt.cli import app


def test_without_a_way_back_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = stocked(tmp_path, monkeypatch, capsys)
    stock.encrypt()
    stranger = tmp_path / "other.key"
    assert stock("keys", "new", str(stranger), "--no-passphrase")[0] == 0
    run = ["--", "touch", "ran"]
    for more, why in (
        ([], "cannot be restored without a key; nothing was done"),
        (["--identity", str(stranger)], "not encrypted for this identity; nothing was done"),
    ):
        assert app.run(["guard", "test", *more, *run]) == 43
        told = capsys.readouterr().err
        assert (why in told, len(told.splitlines())) == (True, 1), told
    assert not (tmp_path / "ran").exists()
    assert app.run(["guard", "test"]) == 2
