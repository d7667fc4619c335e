"""vmckpt audit: what is listed, and that an edited trail has an exit code of its own."""

import hashlib
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from vmckpt.cli import app
from vmckpt.errors import AuditBroken


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A journal in which a host was put into maintenance and taken out of it."""
    (tmp_path / "hosts.yaml").write_text("hosts:\n  alpha: {uri: 'test:///default'}\n")
    monkeypatch.setenv("VMCKPT_INVENTORY", str(tmp_path / "hosts.yaml"))
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path / "state"))
    assert app.run(["maintenance", "enter", "alpha"]) == 0
    assert app.run(["maintenance", "leave", "alpha"]) == 0
    return tmp_path / "state"


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert app.run(["audit", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def edit(state: Path, statement: str) -> None:
    raw = sqlite3.connect(state / "journal.db")
    with raw:
        raw.execute(statement)
    raw.close()


def test_entries_name_the_command_without_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    entered, left = printed(capsys, "list")
    assert (entered["command"], entered["what"]) == ("vmckpt maintenance enter", "began")
    assert (left["command"], left["what"]) == ("vmckpt maintenance leave", "ended")
    assert left["previous"] == entered["digest"]
    assert app.run(["audit", "list", "--since", "1h", "--guest", "alpha"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["entry", "time", "user", "command", "what"]
    assert "vmckpt maintenance enter" in first
    assert "ended completed" in second
    assert printed(capsys, "list", "--limit", "1") == [left]
    assert printed(capsys, "list", "--guest", "web1") == []


def test_anybody_can_recompute_a_digest(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/security.md describes it for programs of others."""
    page = (ROOT / "docs/security.md").read_text().partition("**Recomputing.**")[2]
    names = re.findall(r"`(\w+)`", page.partition("\n*")[0])
    for entry in printed(capsys, "list"):
        fields = json.dumps([entry[name] for name in names], separators=(",", ":"))
        assert hashlib.sha256(fields.encode()).hexdigest() == entry["digest"]


def test_an_edited_trail_is_named_and_still_listed(
    capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    head = printed(capsys, "verify")["head"]
    assert app.run(["audit", "verify", "--head", head.upper()]) == 0
    assert capsys.readouterr().out == f"2 entries, unbroken; head {head}\n"

    edit(state, "UPDATE audit SET at_ms = 'x\x1b[2J' WHERE seq = 2")
    found = printed(capsys, "verify", code=AuditBroken.exit_code)
    assert found["broken"] == {"seq": 2, "why": "the entry was edited"}
    assert app.run(["audit", "verify"]) == AuditBroken.exit_code == 28
    assert "is broken at entry 2: the entry was edited" in capsys.readouterr().err
    assert app.run(["audit", "list"]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert printed(capsys, "list")[1]["at"] is None


def test_a_trail_without_the_known_head_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["audit", "verify", "--head", "0" * 63 + "1"]) == AuditBroken.exit_code
    assert "no entry has the known head" in capsys.readouterr().err
    assert app.run(["audit", "verify", "--head", "12"]) == 2
    assert "is not a digest of 64 hex digits" in capsys.readouterr().err
