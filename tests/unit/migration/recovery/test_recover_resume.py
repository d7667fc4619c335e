"""What is asked before a broken post-copy is gone on with by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import HOST
from tests.support.engine_runs import HYBRID
from tests.support.libvirt_nodes import UUID, node
from tests.support.policies import named
from tests.support.stored_operations import OPERATION, step
from vmckpt.errors import BadInput
from vmckpt.journal.records import StoredStep
from vmckpt.migration.recovery import recover
from vmckpt.migration.recovery.steps import Step
from vmckpt.migration.request import Setting


async def resumed(folder: Path, *steps: StoredStep) -> Any:
    """The guest runs on alpha, and beta does not know it."""
    hosts = [
        replace(HOST, name=name, uri=node(folder / f"{name}.xml", guest=guest), ssh=None)
        for name, guest in (("alpha", True), ("beta", False))
    ]
    setting = Setting(source=hosts[0], target=hosts[1], policies=(named("balanced"),), outside=None)
    nobody: Any = None
    left = recover.open_steps(replace(OPERATION, guest_uuid=UUID), steps)
    return await recover.resume(setting, left, nobody, nobody)


async def test_where_no_order_was_given_there_is_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match="web1 has no post-copy migration to resume: the guest had not begun to move"
    ):
        await resumed(tmp_path)


async def test_a_migration_that_goes_on_is_no_broken_post_copy(tmp_path: Path) -> None:
    """libvirt's test driver says of every guest that runs that a job has it."""
    with pytest.raises(
        BadInput, match="to resume: the migration is still running in libvirt"
    ) as caught:
        await resumed(tmp_path, step(Step.MOVE, order=HYBRID.as_json()))

    assert caught.value.hint == "run vmckpt recover"
