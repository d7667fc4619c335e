"""libvirt calls for a standby: start it paused, change its definition, devices, links and mark."""

import libvirt

from vmckpt.hypervisor import connection as hypervisor_connection
from vmckpt.hypervisor import storage
from vmckpt.hypervisor.qmp import LOCAL, QmpMonitor

_KEEP = (
    libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM
    | libvirt.VIR_DOMAIN_UNDEFINE_KEEP_TPM
    | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA
)
_SECURE = libvirt.VIR_DOMAIN_XML_SECURE


def create_paused(xml: str, *, host: str, uri: str = LOCAL) -> None:
    """Start a transient guest in the paused state. Raises HypervisorError, OutcomeUnknown."""
    flags = libvirt.VIR_DOMAIN_START_PAUSED

    def call(connection: libvirt.virConnect) -> None:
        connection.createXML(xml, flags)

    hypervisor_connection.once(uri, host, "starting the standby", call, changes=True)


def plug(monitor: QmpMonitor, device: str) -> None:
    """Plug a device into a running or paused guest. `device`: the device's XML.

    Raises HypervisorError, OutcomeUnknown.
    """

    def call(domain: libvirt.virDomain) -> None:
        domain.attachDeviceFlags(device, libvirt.VIR_DOMAIN_AFFECT_LIVE)

    monitor.on_domain("plugging in memory", call, changes=True)


def names(*, host: str, uri: str = LOCAL) -> frozenset[str]:
    """Return the names of all guests of the host. Raises HypervisorError."""

    def call(connection: libvirt.virConnect) -> frozenset[str]:
        return frozenset(domain.name() for domain in connection.listAllDomains())

    return hypervisor_connection.once(uri, host, "listing guests", call, changes=False)


def define(xml: str, *, host: str, uri: str = LOCAL, autostart: bool = False) -> None:
    """Store the definition of a guest, running or not. Raises HypervisorError, OutcomeUnknown.

    `autostart`: the guest starts with its host.
    """

    def call(connection: libvirt.virConnect) -> None:
        domain = connection.defineXML(xml)
        if autostart:
            domain.setAutostart(1)

    hypervisor_connection.once(uri, host, "storing the guest's definition", call, changes=True)


def stored(monitor: QmpMonitor) -> tuple[str, bool] | None:
    """Return the guest's stored definition with passwords, and whether it starts with its host.

    Volumes of storage pools are given by path: the backup may have no such pool. Returns None if
    the guest has no stored definition. Raises HypervisorError.
    """

    def call(domain: libvirt.virDomain) -> tuple[str, bool] | None:
        if not domain.isPersistent():
            return None
        text = storage.definition(domain, _SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE)
        return text, bool(domain.autostart())

    return monitor.on_domain("reading the stored definition", call)


def undefine(monitor: QmpMonitor) -> None:
    """Undefine the guest, if it is defined. A running guest keeps running as a transient guest.

    Keeps the guest's NVRAM and TPM state. Raises HypervisorError, OutcomeUnknown.
    """

    def call(domain: libvirt.virDomain) -> None:
        if domain.isPersistent():
            domain.undefineFlags(_KEEP)

    monitor.on_domain("undefining the guest", call, changes=True)


def links_up(monitor: QmpMonitor, cards: list[str]) -> None:
    """Bring up the links of network cards that were down when the guest was started.

    `cards`: the XML of each card, with its link up. Raises HypervisorError, OutcomeUnknown.
    """

    def call(domain: libvirt.virDomain) -> None:
        for card in cards:
            domain.updateDeviceFlags(card, libvirt.VIR_DOMAIN_AFFECT_LIVE)

    monitor.on_domain("bringing up the guest's links", call, changes=True)


def forget_mark(monitor: QmpMonitor, namespace: str) -> None:
    """Remove a running guest's metadata in a namespace, if there is any.

    Raises HypervisorError, OutcomeUnknown.
    """

    def call(domain: libvirt.virDomain) -> None:
        domain.setMetadata(
            libvirt.VIR_DOMAIN_METADATA_ELEMENT,
            None,
            "vmckpt",
            namespace,
            libvirt.VIR_DOMAIN_AFFECT_LIVE,
        )

    monitor.on_domain("removing the standby's mark", call, changes=True)
