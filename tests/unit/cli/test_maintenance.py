"""vmckpt maintenance and roll: which hosts are closed, by whom, and that somebody must say yes."""

import json
from pathlib import Path

import pytest

from vmckpt.cli import app
from vmckpt.journal import controller_identity


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts, and a journal of our own."""
    lines = [f"  {name}: {{uri: 'test:///default'}}\n" for name in ("alpha", "beta")]
    (tmp_path / "hosts.yaml").write_text("hosts:\n" + "".join(lines))
    monkeypatch.setenv("VMCKPT_INVENTORY", str(tmp_path / "hosts.yaml"))
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path / "state"))


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str | None]]:
    capsys.readouterr()
    assert app.run(["maintenance", "list", "--json"]) == 0
    found: list[dict[str, str | None]] = json.loads(capsys.readouterr().out)
    return found


def test_a_host_is_listed_from_its_beginning_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys) == []
    assert app.run(["maintenance", "enter", "beta"]) == 0
    assert app.run(["maintenance", "enter", "alpha", "--why", "new memory"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "alpha is in maintenance"
    me = controller_identity.asked_by()
    assert [(one["host"], one["why"], one["asked_by"]) for one in listed(capsys)] == [
        ("alpha", "new memory", me), ("beta", None, me),
    ]  # fmt: skip
    assert app.run(["maintenance", "list"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["host", "since", "asked", "by", "why"]
    assert first.endswith("new memory")
    assert second.split()[-1] == "–"
    assert app.run(["maintenance", "leave", "beta"]) == 0
    assert [one["host"] for one in listed(capsys)] == ["alpha"]


def test_once_more_changes_nothing_and_says_who_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["maintenance", "enter", "alpha", "--why", "new memory"]) == 0
    assert app.run(["maintenance", "enter", "alpha", "--why", "mine"]) == 0
    said = capsys.readouterr().err
    assert f"is already in maintenance, requested by {controller_identity.asked_by()}" in said
    assert [one["why"] for one in listed(capsys)] == ["new memory"]


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (("enter", "gamma"), 3, "no host 'gamma'; known: alpha, beta"),
        (("leave", "alpha"), 2, "alpha is not in maintenance"),
    ],
)
def test_what_is_not_there_is_an_error(
    words: tuple[str, ...], code: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["maintenance", *words]) == code
    assert why in capsys.readouterr().err


def test_who_may_only_look_closes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VMCKPT_READ_ONLY", "1")
    assert app.run(["maintenance", "enter", "alpha"]) == 5
    assert "nothing was changed" in capsys.readouterr().err
    assert listed(capsys) == []


def test_nothing_is_rolled_if_nobody_can_say_yes(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["roll", "alpha", "beta", "--run", "true"]) == 2
    assert "no confirmation is possible; add --yes" in capsys.readouterr().err
    assert listed(capsys) == []
