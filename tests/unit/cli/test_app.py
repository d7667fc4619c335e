"""The program: errors are one line and an exit code."""

import pytest

import vmckpt
from tests.support.steering import EVIL, OWN, STEERING
from vmckpt.cli import app
from vmckpt.cli.commands import places
from vmckpt.errors import Blocked, VmckptError


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


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (Blocked("it cannot", hint="see above"), 21, "error: it cannot; see above\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (
            PermissionError(13, "Permission denied", "/etc/x"),
            1,
            "error: /etc/x: Permission denied\n",
        ),
        (OSError(28, "No space left on device"), 1, "error: this machine: No space left on dev"),
    ],
)
def test_what_ends_a_command_is_an_exit_code_and_one_line(
    error: BaseException, code: int, told: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(app, "app", fail)
    assert app.run([]) == code
    said = capsys.readouterr().err
    assert said.startswith(told)
    assert said.count("\n") == 1


def test_a_wrong_command_line_says_where_to_read_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["migrat", "web1"]) == 2
    assert "No such command 'migrat'" in (told := capsys.readouterr().err)
    assert told.endswith("; see vmckpt --help\n")
    assert app.run(["migrate", "web1"]) == 2
    assert capsys.readouterr().err.endswith("; see vmckpt migrate --help\n")


def test_its_version_and_its_commands_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--version"]) == 0
    assert capsys.readouterr().out == f"vmckpt {vmckpt.__version__}\n"
    assert app.run(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"\n  {name} " in told for name in places())
