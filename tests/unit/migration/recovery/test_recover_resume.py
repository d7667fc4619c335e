"""What is asked before a broken post-copy is gone on with by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import HOST
from tests.support.engine_runs import HYBRID
from tests.support.policies import named
from tests.support.stored_operations import OPERATION, step
from vmckpt.errors import BadInput
from vmckpt.journal.records import StoredStep
from vmckpt.migration.recovery import recover
from vmckpt.migration.recovery.steps import Step
from vmckpt.migration.request import Setting

UUID = "11111111-1111-4111-8111-111111111111"
DOMAIN = f"""<domain type='test'><name>web1</name><uuid>{UUID}</uuid><memory>65536</memory>
<os><type>hvm</type></os></domain>"""
NODE = """<node><cpu><mhz>1000</mhz><model>m</model><active>2</active><nodes>1</nodes>
<sockets>1</sockets><cores>2</cores><threads>1</threads></cpu><memory>8000000</memory>{}</node>"""


async def resumed(folder: Path, *steps: StoredStep) -> Any:
    """The guest runs on alpha, and beta does not know it."""
    hosts = []
    for name, inside in (("alpha", DOMAIN), ("beta", "")):
        path = folder / f"{name}.xml"
        path.write_text(NODE.format(inside))
        hosts.append(replace(HOST, name=name, uri=f"test://{path}", ssh=None))
    setting = Setting(source=hosts[0], target=hosts[1], policies=(named("balanced"),), outside=None)
    nobody: Any = None
    left = recover.open_steps(replace(OPERATION, guest_uuid=UUID), steps)
    return await recover.resume(setting, left, nobody, nobody)


async def test_where_no_order_was_given_there_is_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no post-copy of web1 to resume: it had not begun to move"):
        await resumed(tmp_path)


async def test_a_migration_that_goes_on_is_no_broken_post_copy(tmp_path: Path) -> None:
    """libvirt's test driver says of every guest that runs that a job has it."""
    with pytest.raises(BadInput, match="to resume: the migration goes on in libvirt") as caught:
        await resumed(tmp_path, step(Step.MOVE, order=HYBRID.as_json()))

    assert caught.value.hint == "run vmckpt recover"
