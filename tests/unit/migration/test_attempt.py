"""What moves a guest in an attempt: nothing of it without the lease."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_runs import ORDER
from tests.support.libvirt_nodes import UUID, node
from vmckpt.errors import HypervisorError, LeaseLost
from vmckpt.hypervisor.backup import Backups
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.migration import attempt
from vmckpt.model.disk import Checkpoint
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


LINE = (Checkpoint(name="virtnbdbackup.0", parent=None, made_at=0),)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ((), ()),
        (("virtnbdbackup.0",), "a disk has no bitmap for it"),
        (HypervisorError("beta: no", host="beta"), "beta: no"),
    ],
)
async def test_checkpoints_of_other_tools_are_kept_or_their_loss_is_told(
    lost: Any, said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def redefine(_backups: Backups, line: Sequence[Checkpoint]) -> tuple[str, ...]:
        assert line == LINE
        if isinstance(lost, HypervisorError):
            raise lost
        return tuple(lost)

    monkeypatch.setattr(Backups, "redefine", redefine)
    async with Hypervisor(Host(name="beta", uri=node(tmp_path / "node.xml"))) as target:
        told = await attempt.keep_checkpoints(target, UUID, LINE)

    assert (not told) if not said else said in told[0]
    assert all("the next backup must be a full backup" in one for one in told)
