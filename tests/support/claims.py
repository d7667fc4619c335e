"""What services claim in a journal, and what those that died had claimed."""

from dataclasses import replace
from pathlib import Path

import pytest

from vmckpt.journal import controller_identity
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal
from vmckpt.scheduler import leases as scheduler_leases


@pytest.fixture(autouse=True)
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path / "state"))


def killed(what: str) -> str:
    """A service that died and held this; its job."""
    with Journal() as journal:
        dead = replace(controller_identity.this_process(), pid=1, started=1)
        id_ = journal.begin(NewOperation(kind="run", guest="schedules"), controller=dead)
        journal.acquire(id_, scheduler_leases.lease_of(what), by=dead)
    return id_
