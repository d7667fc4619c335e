"""What can be asked of a migration whose controller has ended."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from vmckpt.errors import BadInput
from vmckpt.journal.records import RequestKind
from vmckpt.migration.recovery import direct_control


async def test_without_its_controller_agents_cannot_be_told_anything_but_by_recovery() -> None:
    operation = SimpleNamespace(
        id="m-1", guest="web1", guest_uuid="u-1", mode="checkpoint", source="alpha", target="beta"
    )
    told = await direct_control.act(
        cast("Any", None), cast("Any", operation), RequestKind.CANCEL, {}, cast("Any", None)
    )
    assert not told.ok
    assert "vmckpt recover" in told.text
    operation.guest_uuid = None
    with pytest.raises(BadInput):
        await direct_control.act(
            cast("Any", None), cast("Any", operation), RequestKind.CANCEL, {}, cast("Any", None)
        )
