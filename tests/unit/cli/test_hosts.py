"""vmckpt guests names a guest that has two copies."""

import pytest

from tests.support.two_copies import TWO, asked
from vmckpt.cli import hosts as hosts_command
from vmckpt.errors import TwoCopies


@pytest.mark.parametrize("json", [False, True])
def test_the_list_of_guests_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], json: bool
) -> None:
    asked(monkeypatch, TWO, TWO)
    with pytest.raises(TwoCopies, match=r"web1 is running on alpha and beta; run vmckpt recover"):
        hosts_command.guests(json=json)
    assert "web1" in capsys.readouterr().out
