"""Clean up the paused copies of a guest that a failed migration left behind."""

import json

import libvirt
import libvirt_qemu

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor.connection import Hypervisor

_ARRIVING = (
    (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_MIGRATION),
    (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_STARTING_UP),
)
_LEAVING = (
    (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_MIGRATION),
    # vmckpt paused the guest during the migration, or libvirtd was restarted during a pause.
    (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_USER),
    (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_UNKNOWN),
)

States = tuple[tuple[int, int], ...]


def _standing(
    hypervisor: Hypervisor, connection: libvirt.virConnect, uuid: str, states: States
) -> libvirt.virDomain:
    """Return the copy if it is still in one of `states`. Raises HypervisorError."""
    domain = connection.lookupByUUIDString(uuid)
    if tuple(domain.state()) not in states:
        raise HypervisorError(
            f"{domain.name()} on {hypervisor.host.name} is no longer paused by a migration",
            host=hypervisor.host.name,
            hint="run vmckpt recover again",
        )
    return domain


async def handed_over(hypervisor: Hypervisor, uuid: str) -> bool:
    """Return whether QEMU has sent the complete guest; True if QEMU does not answer."""
    return await _stream(hypervisor, uuid) in ("completed", None)


async def source_never_completed(hypervisor: Hypervisor, uuid: str) -> bool:
    """Return whether QEMU reports that it never migrated the guest, or that the migration failed.

    A cancelled migration counts as failed. Returns False if QEMU does not answer. The result is
    meaningless if QEMU was started after the migration.
    """
    return await _stream(hypervisor, uuid) in ("none", "failed", "cancelled")


async def _stream(hypervisor: Hypervisor, uuid: str) -> str | None:
    """Return the status of QEMU's last migration; None if QEMU does not answer."""

    def read(connection: libvirt.virConnect) -> str:
        guest = connection.lookupByUUIDString(uuid)
        answer = libvirt_qemu.qemuMonitorCommand(guest, '{"execute": "query-migrate"}', 0)
        return str(json.loads(answer)["return"].get("status", "none"))

    try:
        return await hypervisor.query("reading QEMU's migration status", read)
    except HypervisorError:
        return None


async def end_arriving(hypervisor: Hypervisor, uuid: str) -> None:
    """Destroy a copy that has not arrived completely and never ran.

    Raises HypervisorError, also if the copy is in another state; OutcomeUnknown, ReadOnly.
    """

    def change(connection: libvirt.virConnect) -> None:
        _standing(hypervisor, connection, uuid, _ARRIVING).destroy()

    await hypervisor.execute("destroying a copy that never ran", change)


async def end_leaving(hypervisor: Hypervisor, uuid: str) -> None:
    """Destroy the source's paused copy of a guest that was handed over. Keeps the definition.

    Raises HypervisorError, also if the copy is not paused; OutcomeUnknown, ReadOnly.
    """

    def change(connection: libvirt.virConnect) -> None:
        _standing(hypervisor, connection, uuid, _LEAVING).destroy()

    await hypervisor.execute("destroying the source's paused copy", change)


async def start_leaving(hypervisor: Hypervisor, uuid: str) -> None:
    """Resume a guest on the source that a failed migration left paused.

    Raises HypervisorError, also if the guest is not paused; OutcomeUnknown, ReadOnly.
    """

    def change(connection: libvirt.virConnect) -> None:
        _standing(hypervisor, connection, uuid, _LEAVING).resume()

    await hypervisor.execute("resuming the guest", change)
