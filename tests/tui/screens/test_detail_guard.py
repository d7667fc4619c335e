"""The screen of one protection while others have it in their hands, or nobody can be asked."""

import asyncio
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.dashboards import seen, until
from tests.support.following import take
from tests.tui import still
from tests.tui.still import Still
from vmckpt import inventory
from vmckpt.app.dashboard_source import Live
from vmckpt.errors import JournalError
from vmckpt.journal import controller_identity
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal
from vmckpt_tui.app import Dashboard, Pace, Setting
from vmckpt_tui.screens.detail import GuardScreen


class Away(Still):
    """Nobody can say how protections stand."""

    async def protections(self) -> Mapping[str, Mapping[str, Any]]:
        if self.away:
            raise JournalError("the disk is full")
        return self.entries

    away = False


async def test_a_protection_in_other_hands_is_not_over_and_old_numbers_are_told() -> None:
    source = Away()
    app = Dashboard(Setting(source=source, commands=source, pace=Pace(guard=0.1, share=1.0)))
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await pilot.press("3", "enter")
        await pilot.pause(0.3)
        source.away = True
        await until(pilot, "the status shown is outdated: the disk is full")
        by = dataclasses.replace(still.PROTECT.operation.controller, host="here", pid=77)
        taken = dataclasses.replace(still.PROTECT.operation, controller=by)
        source.views = (dataclasses.replace(still.PROTECT, operation=taken, attended=True),)
        source.entries, source.away = {}, False
        await until(pilot, "by process 77 on here")
        source.views = (dataclasses.replace(still.PROTECT, operation=taken, attended=False),)
        await until(pilot, "orphaned: its controller is gone; run vmckpt recover")


async def test_an_orphaned_protection_is_recovered_by_the_command_on_its_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts.yaml").write_text("hosts: {alpha: {uri: 'test:///default'}}\n")
    monkeypatch.setenv("VMCKPT_INVENTORY", str(tmp_path / "hosts.yaml"))
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path / "state"))
    gone = dataclasses.replace(controller_identity.this_process(), started=1)
    protect = NewOperation(kind="protect", guest="test", source="alpha", target="alpha")
    with Journal() as journal:
        id_ = journal.begin(protect, controller=gone)
    source = Live(inventory.load(tmp_path / "hosts.yaml"))
    app = Dashboard(Setting(source=source, commands=Still(), pace=Pace(guard=0.1, share=1.0)))
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        app.push_screen(GuardScreen(source, app.model, id_))
        await until(pilot, "orphaned: its controller is gone; run vmckpt recover")
        (recover,) = take(next(line for line in seen(app).splitlines() if "orphaned" in line))
        program = (sys.executable, "-m", "vmckpt.cli.app", *recover.words[1:])
        assert await (await asyncio.create_subprocess_exec(*program)).wait() == 0
        await until(pilot, "ended: ")
