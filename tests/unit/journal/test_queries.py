"""Journals that are opened to look at them alone."""

import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vmckpt.errors import JournalError, ReadOnly
from vmckpt.journal import jobs
from vmckpt.journal.location import VARIABLE
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal
from vmckpt.lease.controller_lease import Fence

WEB1 = NewOperation(kind="migrate", guest="web1", guest_uuid="u-1", source="alpha", target="beta")
FENCE = Fence(resource="guest/u-1", token=1, operation="m-1")


def test_what_another_process_writes_is_seen(
    place: Path | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(place))
    with Journal(place) as writer:
        first = writer.begin(WEB1)
        with jobs.open_journal(read_only=True) as looking:
            second = writer.begin(WEB1)
            assert {one.id for one in looking.operations()} == {first, second}
    with Journal(place, read_only=True) as looking:  # and when nobody has it open any more
        assert len(looking.operations()) == 2
        assert looking.now() > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda journal: journal.begin(WEB1),
        lambda journal: journal.acquire("m-1", "guest/u-1"),
        lambda journal: journal.intend("m-1", "move", {}, FENCE),
        lambda journal: journal.release(FENCE),
        lambda journal: journal.ask("m-1", "cancel", {}, "eve"),
        lambda journal: journal.finish("m-1", "completed", None),
    ],
)
def test_nothing_is_written(place: Path | str, change: Callable[[Journal], object]) -> None:
    Journal(place).close()
    with Journal(place, read_only=True) as looking:
        with pytest.raises(ReadOnly, match="open read-only; nothing was written"):
            change(looking)
        assert looking.operations() == []


def test_where_there_is_none_that_is_told_and_none_is_made(tmp_path: Path) -> None:
    path = tmp_path / "state" / "journal.db"

    with pytest.raises(JournalError, match=f"^journal {path} does not exist; name another file"):
        Journal(path, read_only=True)
    assert not path.parent.exists()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="not a regular file"):
        Journal(tmp_path, read_only=True)


LOOKER = """
import sys
from pathlib import Path
from vmckpt.journal.store import Journal
with Journal(Path(sys.argv[1]), read_only=True) as journal:
    print(len(journal.operations()))
"""


def test_a_file_with_a_strange_name_is_looked_at_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "50% ?mode=rwc#journal.db"
    with Journal(path) as writer:
        writer.begin(WEB1)
        done = subprocess.run(
            [sys.executable, "-c", LOOKER, str(path)], capture_output=True, text=True, check=True
        )

        assert done.stdout == "1\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
