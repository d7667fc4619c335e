"""The program: errors are one line and an exit code."""

import pytest

from tests.support.steering import EVIL, OWN, STEERING
from vmckpt.cli import app
from vmckpt.errors import VmckptError


def test_an_error_with_a_hostile_name_is_one_harmless_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise VmckptError(f"no guest {EVIL}\nerror: all is well")

    monkeypatch.setattr(app, "app", fail)

    assert app.run([]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert STEERING.search(OWN.sub("", told)) is None


@pytest.mark.parametrize("word", [EVIL, "-" + EVIL, "--" + EVIL, "a\nb", "\udcff"])
def test_a_hostile_argument_is_one_harmless_line(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["migrate", word]) == 2
    assert app.run(["plan", "web1", "--to", "beta", "--probe", word.replace("\udcff", "")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 2
    assert STEERING.search(OWN.sub("", told)) is None
