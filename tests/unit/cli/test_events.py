"""vmckpt events: lines or objects, of what was asked for, until Ctrl-C."""

import json
import time

import pytest
from typer.testing import CliRunner

from tests.support.happenings import WEB1, WEB2, journal, tell
from vmckpt.cli import events as command
from vmckpt.journal.store import Journal

__all__ = ["journal"]


def ran(*words: str) -> str:
    done = CliRunner().invoke(command.app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_tells_them_in_lines_or_objects(journal: Journal) -> None:
    mine, other = journal.begin(WEB1), journal.begin(WEB2)
    tell(journal, mine)
    journal.finish(mine, "completed", {})

    text = ran("--since", "1min")
    assert f"{mine} web1: decided wait, because it gets less" in text
    assert f"{mine} web1: migrate ended: completed" in text
    told = [json.loads(line) for line in ran("--since", "1min", "--json").splitlines()]
    assert {one["job"] for one in told} == {mine, other}
    assert [one["event"] for one in told if one["job"] == other] == ["began"]
    [decided] = [one for one in told if one["event"] == "decided"]
    assert (decided["guest"], decided["values"]["rule"]) == ("web1", "grow")
    for about in ("web2", "gamma", other):
        assert {json.loads(line)["job"] for line in ran(about, "--json").splitlines()} == {other}


def test_it_goes_on_until_it_is_interrupted(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter(range(3))

    def sleep(_: float) -> None:
        if next(looks) == 2:
            raise KeyboardInterrupt
        journal.finish(journal.begin(WEB1), "completed", {})

    monkeypatch.setattr(time, "sleep", sleep)
    done = CliRunner().invoke(command.app, ["--follow", "--json"])

    assert done.exit_code == 130
    told = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert told == ["began", "ended"] * 2
