"""Where the journal is."""

from pathlib import Path

import pytest

from vmckpt.errors import JournalError
from vmckpt.journal import location


def test_the_journal_is_where_the_environment_says() -> None:
    assert location.state_folder({"VMCKPT_STATE": "/x"}, root=True) == Path("/x")
    assert location.state_folder({}, root=True) == Path("/var/lib/vmckpt")
    assert location.state_folder({"XDG_STATE_HOME": "/s"}, root=False) == Path("/s/vmckpt")
    assert location.state_folder({"XDG_STATE_HOME": "s"}, root=False) == (
        Path.home() / ".local/state/vmckpt"
    )


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        ("/j/x.db", Path("/j/x.db")),
        ("none", "none"),
        ("postgresql://anna@db/jobs", "postgresql://anna@db/jobs"),
        ("", Path("/x/journal.db")),
    ],
)
def test_a_journal_that_is_named_wins(named: str, meant: Path | str) -> None:
    environ = {"VMCKPT_STATE": "/x", "VMCKPT_JOURNAL": named}

    assert location.chosen(environ, root=True) == meant


@pytest.mark.parametrize("text", ["mysql://db/jobs", "file:///j/x.db"])
def test_a_url_of_another_kind_is_refused(text: str) -> None:
    with pytest.raises(
        JournalError, match="URLs are not supported for a journal; use a file, or postgresql://"
    ):
        location.parse(text)


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("postgresql://anna:secret@db/jobs", True),
        ("postgresql://db/jobs?password=secret", True),
        ("postgresql://db/jobs?user=anna&sslpassword=secret", True),
        ("host=db password=secret", True),
        ("postgresql://anna@db:5432/jobs", False),
        ("/home/a:b@c/journal.db", False),
        ("postgresql://db/jobs?passfile=/x", False),
    ],
)
def test_a_password_in_a_location_is_seen(text: str, has: bool) -> None:
    assert location.has_password(text) is has


def test_what_is_chosen_counts_in_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VMCKPT_JOURNAL", "none")
    assert not location.there(location.default())
    location.choose(str(tmp_path / "j.db"))
    assert location.default() == tmp_path / "j.db"
    assert not location.there(location.default())
    (tmp_path / "j.db").touch()
    assert location.there(location.default())
    with pytest.raises(JournalError):
        location.choose("mysql://db")
    assert location.default() == tmp_path / "j.db"
