"""vmckpt guard: its exit code, and the signals that it passes on."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.restored import RESTORED, TAKEN
from vmckpt.cli.guard import ended, stop_of
from vmckpt.errors import Cancelled, GuardRolledBack, HookFailed
from vmckpt.snapshot.guard import Outside
from vmckpt.snapshot.guard_rules import Ending, GuardResult

BACK = GuardResult(
    ending=Ending.BACK, why="the command failed", stopped=False, command=1, checks=0, taken=TAKEN,
    restored=RESTORED, job=None,
)  # fmt: skip


@pytest.mark.parametrize(
    ("done", "kind"),
    [
        (BACK, GuardRolledBack),
        (replace(BACK, stopped=True), Cancelled),
        (replace(BACK, restored=replace(RESTORED, hook=5)), HookFailed),
        (replace(BACK, ending=Ending.KEPT, restored=None), None),
    ],
)
def test_the_exit_code_tells_how_it_ended(done: GuardResult, kind: type[Exception] | None) -> None:
    failed = ended(done)
    assert (None if failed is None else type(failed)) is kind
    assert failed is None or f"web1 was restored to {TAKEN.id}" in str(failed)


async def test_the_first_signal_is_passed_on_and_the_second_kills(tmp_path: Path) -> None:
    outside, file = Outside(quiet=True), tmp_path / "began"
    stop = stop_of(outside)
    deaf = f"trap 'echo heard >> {file}' TERM; echo began > {file}; while :; do sleep 0.05; done"
    running = asyncio.create_task(outside.shell(deaf, {}, None))
    for said in ("began\n", "began\nheard\n"):
        while not (file.exists() and file.read_text() == said):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not running.done()
        os.kill(os.getpid(), signal.SIGTERM)
    assert await running == -signal.SIGKILL
    assert stop.is_set()
