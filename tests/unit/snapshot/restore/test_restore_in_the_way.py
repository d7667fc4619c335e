"""What stands in the way of a restore in a guest's own place, asked of libvirt's test driver."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import libvirt
import pytest
import pytest_asyncio

from tests.support import libvirt_host
from tests.support.libvirt_host import UUID
from vmckpt.errors import BadInput, GuestLocked
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.snapshot.request import RestoreRequest
from vmckpt.snapshot.restore import restore

PLAN = restore._Plan(guest="web1", uuid=UUID, xml="<domain/>", images={})
BACK = RestoreRequest(snapshot="s-1")


@pytest_asyncio.fixture
async def alpha(tmp_path: Path) -> AsyncIterator[Hypervisor]:
    async with Hypervisor(libvirt_host.host(tmp_path)) as found:
        yield found


async def done(alpha: Hypervisor, *words: str) -> None:
    """To the guest, as an operator would."""

    def act(connection: libvirt.virConnect) -> None:
        getattr(connection.lookupByUUIDString(UUID), words[0])(*words[1:], 0)

    await alpha.query("acting", act)


async def test_a_guest_that_runs_is_ended_only_if_it_is_said(alpha: Hypervisor) -> None:
    with pytest.raises(GuestLocked, match="--replace"):
        await restore._in_the_way(alpha, PLAN, BACK)
    assert await restore._in_the_way(alpha, PLAN, replace(BACK, end_running=True))


async def test_memory_that_libvirt_saved_is_not_put_on_other_disks(alpha: Hypervisor) -> None:
    await done(alpha, "managedSave")
    with pytest.raises(BadInput, match="virsh managedsave-remove web1"):
        await restore._in_the_way(alpha, PLAN, replace(BACK, end_running=True))
    await done(alpha, "managedSaveRemove")
    assert not await restore._in_the_way(alpha, PLAN, BACK)


async def test_a_guest_that_was_renamed_is_not_ended_for_its_old_name(alpha: Hypervisor) -> None:
    renamed = replace(PLAN, guest="web1-old")
    with pytest.raises(BadInput, match="virsh domrename web1 web1-old"):
        await restore._in_the_way(alpha, renamed, replace(BACK, end_running=True))


async def test_a_fork_takes_no_name_that_is_taken(alpha: Hypervisor) -> None:
    fork = replace(BACK, fork="web1")
    with pytest.raises(BadInput, match="choose another name with --as"):
        await restore._in_the_way(alpha, replace(PLAN, uuid="2" * 8 + UUID[8:]), fork)
