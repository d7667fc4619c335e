"""What a broken migration leaves: copies of a guest whose CPUs stand still for it."""

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
    # What we paused ourselves during a migration, and what a restarted libvirtd found so.
    (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_USER),
    (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_UNKNOWN),
)

States = tuple[tuple[int, int], ...]


def _standing(
    hypervisor: Hypervisor, connection: libvirt.virConnect, uuid: str, states: States
) -> libvirt.virDomain:
    """The copy, looked at once more right before it is touched. Raises HypervisorError."""
    domain = connection.lookupByUUIDString(uuid)
    if tuple(domain.state()) not in states:
        raise HypervisorError(
            f"{domain.name()} on {hypervisor.host.name} does not stand still for a migration",
            host=hypervisor.host.name,
            hint="run vmckpt recover again: something has changed meanwhile",
        )
    return domain


async def handed_over(hypervisor: Hypervisor, uuid: str) -> bool:
    """Whether QEMU has sent all of the guest away; True also if it cannot be asked."""
    return await _stream(hypervisor, uuid) in ("completed", None)


async def source_never_completed(hypervisor: Hypervisor, uuid: str) -> bool:
    """Whether QEMU says that it has not sent all of the guest away; False if it cannot be asked.
    Of a QEMU that is younger than a migration it means nothing."""
    return await _stream(hypervisor, uuid) in ("none", "failed", "cancelled")


async def _stream(hypervisor: Hypervisor, uuid: str) -> str | None:
    """How far QEMU's last migration came, in its words; None: it cannot be asked."""

    def read(connection: libvirt.virConnect) -> str:
        guest = connection.lookupByUUIDString(uuid)
        answer = libvirt_qemu.qemuMonitorCommand(guest, '{"execute": "query-migrate"}', 0)
        return str(json.loads(answer)["return"].get("status", "none"))

    try:
        return await hypervisor.query("asking QEMU about the stream", read)
    except HypervisorError:
        return None


async def end_arriving(hypervisor: Hypervisor, uuid: str) -> None:
    """End a copy that has not arrived and never ran. Raises HypervisorError, also if it is none."""

    def change(connection: libvirt.virConnect) -> None:
        _standing(hypervisor, connection, uuid, _ARRIVING).destroy()

    await hypervisor.execute("ending a copy that never ran", change)


async def end_leaving(hypervisor: Hypervisor, uuid: str) -> None:
    """End a copy that was handed over; its definition stays. Raises HypervisorError, also if it
    does not stand still."""

    def change(connection: libvirt.virConnect) -> None:
        _standing(hypervisor, connection, uuid, _LEAVING).destroy()

    await hypervisor.execute("ending a copy that was handed over", change)


async def start_leaving(hypervisor: Hypervisor, uuid: str) -> None:
    """Let a guest go on that stands still for a migration that failed. Raises HypervisorError."""

    def change(connection: libvirt.virConnect) -> None:
        _standing(hypervisor, connection, uuid, _LEAVING).resume()

    await hypervisor.execute("letting the guest go on", change)
