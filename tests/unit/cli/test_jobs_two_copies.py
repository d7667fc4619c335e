"""vmckpt jobs names a guest that has two copies."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.two_copies import (
    BOTH,
)
from tests.tui.still import PROTECT, entry
from vmckpt.cli import app
from vmckpt.cli import jobs as jobs_command
from vmckpt.journal import jobs


@pytest.mark.parametrize("json", [False, True])
def test_the_list_of_jobs_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], json: bool
) -> None:
    monkeypatch.setattr(jobs, "open_journal", _nothing)
    monkeypatch.setattr(jobs, "jobs", lambda *_, **__: [PROTECT])
    monkeypatch.setattr(jobs_command, "protections", lambda *_: {"p-9abc": BOTH})
    args = ["jobs", "--json"] if json else ["jobs"]
    assert app.run(args) == 27
    told = capsys.readouterr()
    assert "safe may be running on alpha and beta: its standby has taken over" in told.err
    assert ('"two_copies"' if json else "two copies") in told.out
    monkeypatch.setattr(jobs_command, "protections", lambda *_: {"p-9abc": entry()})
    assert app.run(args) == 0
    assert "copies" not in capsys.readouterr().out


@contextmanager
def _nothing() -> Iterator[None]:
    yield None
