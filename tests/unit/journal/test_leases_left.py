"""Jobs that nobody attends and are no migrations, and lists that leave out none that is active."""

import json
from dataclasses import replace

import pytest

from tests.support.recorded_jobs import journal, ran
from vmckpt.errors import OrphanedJobs
from vmckpt.journal import controller_identity
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal

__all__ = ["journal"]


@pytest.mark.parametrize("kind", ["snapshot", "restore", "run", "evacuate", "protect"])
def test_of_what_is_no_migration_libvirt_knows_nothing(journal: Journal, kind: str) -> None:
    """virsh suspend would stop a guest whose snapshot died."""
    gone = replace(controller_identity.this_process(), pid=1, started=1)
    new = NewOperation(kind=kind, guest="web1", source="alpha")
    id_ = journal.begin(new, controller=gone)
    for word in ("cancel", "pause"):
        with pytest.raises(OrphanedJobs, match="run vmckpt recover") as told:
            ran(word, id_)
        assert "virsh" not in str(told.value)
    journal.leave(id_, by=gone)
    with pytest.raises(OrphanedJobs, match="has given up control"):
        ran("cancel", id_)


def test_no_job_that_is_active_is_left_out(
    journal: Journal, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [journal.begin(NewOperation(kind="migrate", guest=f"w{n}")) for n in range(60)]
    past = [journal.begin(NewOperation(kind="migrate", guest="old")) for _ in range(60)]
    for one in past:
        journal.finish(one, "completed", None)
    capsys.readouterr()
    for words, ended in (((), 0), (("--all",), 50), (("--all", "--limit", "3"), 3)):
        capsys.readouterr()
        said = ran("jobs", "--json", *words) or capsys.readouterr().out
        told = [one["job"] for one in json.loads(said)]
        assert set(ids) <= set(told)
        assert len(told) == 60 + ended
