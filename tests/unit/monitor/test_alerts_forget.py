"""A job that is ended by the operator's word, and one that is let go on: who may, what is told."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vmckpt.cli import app
from vmckpt.errors import ReadOnly
from vmckpt.journal import controller_identity
from vmckpt.journal.follow import ENDED, Happening
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal
from vmckpt.monitor import alerts

HOSTS = "hosts: {alpha: {uri: 'test:///default'}}\n"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path / "state"))
    return tmp_path


def left(kind: str = "migrate") -> str:
    """A job whose controller died; its id."""
    with Journal() as journal:
        dead = replace(controller_identity.this_process(), pid=1, started=1)
        new = NewOperation(kind=kind, guest="web1", source="alpha", target="beta")
        return journal.begin(new, controller=dead)


def test_what_is_forgotten_is_told_as_anything_that_was_settled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    id_ = left()
    assert app.run(["recover", "--forget", id_, "--json"]) == 0
    [told] = json.loads(capsys.readouterr().out)
    assert (told["job"], told["outcome"], told["guest"]) == (id_, "unknown", "web1")
    assert "at your request" in told["truth"]

    with Journal() as journal:
        [ended] = journal.ended(0.0)
    values = {"outcome": ended.outcome, "error": None}
    happened = Happening(at=0.0, kind=ENDED, operation=ended, values=values)
    assert alerts.of_happening(happened) is None, "who said so knows it"
    assert alerts.of_happening(replace(happened, operation=replace(ended, report={})))


@pytest.mark.parametrize(
    ("kind", "words"), [("migrate", ["recover", "--forget"]), ("evacuate", ["resume"])]
)
def test_who_may_only_look_ends_nothing_and_lets_nothing_go_on(
    state: Path, kind: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    id_ = left(kind)
    (state / "hosts.yaml").write_text(HOSTS + "read_only: true\n")
    done = app.run([*words, id_, "--inventory", str(state / "hosts.yaml")])
    assert done == ReadOnly.exit_code
    assert "nothing was changed" in capsys.readouterr().err
    with Journal() as journal:
        assert journal.operation(id_).active
