"""Migrations by the facade: where a guest is, and what is resumed or forgotten."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.happenings import WEB1, journal
from vmckpt.app import controller as app_controller
from vmckpt.app import migration
from vmckpt.errors import BadInput
from vmckpt.inventory import Inventory
from vmckpt.journal import jobs
from vmckpt.journal.store import Journal
from vmckpt.model.events import Caller

__all__ = ["journal"]


NO_HOSTS = Inventory(path=Path("hosts.yaml"), hosts={}, observer=None)
NOBODY = Caller(emit=lambda _: None, warn=lambda _: None, stop=asyncio.Event())


@pytest.mark.parametrize(
    ("kind", "entrusted", "says"),
    [
        ("protect", True, "is a protect job, which agents on its hosts go on with"),
        ("snapshot", False, "is a snapshot job: only a migration is resumed"),
    ],
)
async def test_only_a_migration_is_resumed(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, kind: str, entrusted: bool, says: str
) -> None:
    monkeypatch.setattr(jobs, "open_journal", lambda: nullcontext(journal))
    id_ = journal.begin(replace(WEB1, kind=kind))
    if entrusted:
        journal.entrust(id_, "alpha")
    before = journal.operation(id_)
    with pytest.raises(BadInput, match=says):
        await migration.resume(app_controller.Controller(inventory=NO_HOSTS, caller=NOBODY), id_)
    assert journal.operation(id_).controller == before.controller
