"""The screen of one protection while others have it in their hands, or nobody can be asked."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tests.support.dashboards import until
from tests.tui import still
from tests.tui.still import Still
from vmckpt.errors import JournalError
from vmckpt_tui.app import Dashboard, Pace, Setting


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
