"""Plug and unplug devices of a running guest, and read what this requires from libvirt."""

import libvirt

from vmckpt.hypervisor.qmp import DomainCaller

_LIVE = libvirt.VIR_DOMAIN_AFFECT_LIVE


def unplug(caller: DomainCaller, element: str) -> None:
    """Ask a guest to release a device. libvirt waits up to 5 s for the guest.

    `element`: the device in the guest's live XML. When this function returns, the guest may not
    have released the device yet. Raises HypervisorError if libvirt, QEMU or the guest refuses, and
    OutcomeUnknown.
    """
    caller.on_domain(
        "unplugging a device", lambda domain: domain.detachDeviceFlags(element, _LIVE), changes=True
    )


def plug(caller: DomainCaller, element: str) -> None:
    """Plug a device into a running guest. Raises HypervisorError, OutcomeUnknown."""
    caller.on_domain(
        "plugging in a device", lambda domain: domain.attachDeviceFlags(element, _LIVE),
        changes=True,
    )  # fmt: skip


def run_id(caller: DomainCaller) -> int | None:
    """Return libvirt's ID of this run of a guest; None if the guest is off. Raises HypervisorError.

    Each start of a guest has a different ID, until the host is rebooted.
    """
    found = caller.on_domain("reading the guest's ID", libvirt.virDomain.ID)
    return None if found < 0 else found


def network_is_active(caller: DomainCaller, name: str) -> bool:
    """Return whether the guest's host has a libvirt network with this name that is active.

    Raises HypervisorError.
    """

    def look(domain: libvirt.virDomain) -> bool:
        try:
            return bool(domain.connect().networkLookupByName(name).isActive())
        except libvirt.libvirtError as exc:
            if exc.get_error_code() == libvirt.VIR_ERR_NO_NETWORK:
                return False
            raise

    return caller.on_domain(f"looking for network {name}", look)
