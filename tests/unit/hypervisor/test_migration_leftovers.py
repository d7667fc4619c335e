"""What a broken migration leaves is ended or goes on only while it stands still for it."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import libvirt
import libvirt_qemu
import pytest
import pytest_asyncio

from tests.support import libvirt_host
from tests.support.libvirt_host import UUID
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import domains, migration_leftovers
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.guest import GuestState

ARRIVES = [libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_STARTING_UP]
LEAVES = [libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_USER]
MIGRATES = [libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_MIGRATION]
RUNS = [libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_RUNNING_MIGRATION_CANCELED]
CALLS = (
    migration_leftovers.end_arriving,
    migration_leftovers.end_leaving,
    migration_leftovers.start_leaving,
)


@pytest_asyncio.fixture
async def alpha(tmp_path: Path) -> AsyncIterator[Hypervisor]:
    """Its guest is paused."""

    def suspend(connection: libvirt.virConnect) -> None:
        connection.lookupByUUIDString(UUID).suspend()

    async with Hypervisor(libvirt_host.host(tmp_path)) as found:
        await found.execute("pausing it", suspend)
        yield found


@pytest.mark.parametrize(
    ("state", "allowed"),
    [
        (ARRIVES, (True, False, False)),
        (LEAVES, (False, True, True)),
        (MIGRATES, (True, True, True)),
        (RUNS, (False, False, False)),
    ],
)
@pytest.mark.parametrize("call", range(3))
async def test_only_a_copy_that_stands_still_for_a_migration_is_touched(
    alpha: Hypervisor, monkeypatch: pytest.MonkeyPatch, state: list[int],
    allowed: tuple[bool, ...], call: int,
) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(libvirt.virDomain, "state", lambda _: state)
        if allowed[call]:
            await CALLS[call](alpha, UUID)
        else:
            with pytest.raises(HypervisorError, match="is no longer paused by a migration"):
                await CALLS[call](alpha, UUID)
    becomes = GuestState.RUNNING if call == 2 else GuestState.SHUT_OFF
    found = (await domains.presence(alpha, UUID)).state
    assert found is (becomes if allowed[call] else GuestState.PAUSED)


@pytest.mark.parametrize(
    ("status", "handed", "never"),
    [
        ("completed", True, False), ("active", False, False), ("failed", False, True),
        ("cancelled", False, True), (None, False, True), ("device", False, False),
    ],
)  # fmt: skip
async def test_how_far_the_stream_came_is_qemus_word(
    alpha: Hypervisor, monkeypatch: pytest.MonkeyPatch, status: str | None, handed: bool,
    never: bool,
) -> None:  # fmt: skip
    told = {} if status is None else {"status": status}
    answer = json.dumps({"return": told})
    monkeypatch.setattr(libvirt_qemu, "qemuMonitorCommand", lambda *_: answer)
    assert await migration_leftovers.handed_over(alpha, UUID) is handed
    assert await migration_leftovers.source_never_completed(alpha, UUID) is never


async def test_a_qemu_that_cannot_be_asked_may_have_sent_all(alpha: Hypervisor) -> None:
    unknown = UUID.replace("1", "2")
    assert await migration_leftovers.handed_over(alpha, unknown)
    assert not await migration_leftovers.source_never_completed(alpha, unknown)
