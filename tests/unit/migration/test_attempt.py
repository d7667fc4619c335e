"""What moves a guest in an attempt: nothing of it without the lease."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_runs import ORDER
from tests.support.libvirt_nodes import UUID, node
from vmckpt.errors import LeaseLost
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.migration import attempt
from vmckpt.model.host import Host
from vmckpt.model.migration import AutoConverge
from vmckpt.units import MIB, Bytes, Seconds

CHANGES: dict[str, dict[str, Any]] = {
    "migrate": {"order": ORDER},
    "abort": {},
    "set_autostart": {},
    "set_max_downtime": {"limit": Seconds(0.1)},
    "set_bandwidth": {"limit": None, "post_copy": True},
    "throttle": {"how": AutoConverge(initial=1, increment=1, at_most=1)},
    "set_cache": {"size": Bytes(MIB)},
    "pause_guest": {},
    "start_post_copy": {},
    "free_target": {},
    "undefine_on_source": {},
    "undefine_on_target": {},
}


@pytest.mark.parametrize("call", CHANGES)
async def test_whoever_lost_the_lease_changes_nothing(call: str, tmp_path: Path) -> None:
    uri = node(tmp_path / "node.xml")

    def check() -> None:
        raise LeaseLost("another controller has taken over")

    async with (
        Hypervisor(Host(name="alpha", uri=uri)) as source,
        Hypervisor(Host(name="beta", uri=uri)) as target,
    ):
        mover = attempt.migration_driver((source, target), None, "web1", UUID, check)
        with pytest.raises(LeaseLost):
            await getattr(mover, call)(**CHANGES[call])
