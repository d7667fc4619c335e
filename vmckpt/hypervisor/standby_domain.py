"""What of libvirt a waiting standby needs: started without memory, run, stored, taken away."""

import libvirt

from vmckpt.hypervisor import connection as hypervisor_connection
from vmckpt.hypervisor.qmp import LOCAL, QmpMonitor

_KEEP = (
    libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM
    | libvirt.VIR_DOMAIN_UNDEFINE_KEEP_TPM
    | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA
)
_SECURE = libvirt.VIR_DOMAIN_XML_SECURE


def create_paused(xml: str, *, host: str, uri: str = LOCAL) -> None:
    """Start a guest that libvirt stores no definition of; it does not run yet.

    Raises HypervisorError.
    """
    flags = libvirt.VIR_DOMAIN_START_PAUSED

    def call(connection: libvirt.virConnect) -> None:
        connection.createXML(xml, flags)

    hypervisor_connection.once(uri, host, "starting the standby", call, changes=True)


def names(*, host: str, uri: str = LOCAL) -> frozenset[str]:
    """All guests that libvirt knows there. Raises HypervisorError."""

    def call(connection: libvirt.virConnect) -> frozenset[str]:
        return frozenset(domain.name() for domain in connection.listAllDomains())

    return hypervisor_connection.once(uri, host, "listing its guests", call, changes=False)


def define(xml: str, *, host: str, uri: str = LOCAL, autostart: bool = False) -> None:
    """Store a definition, of a guest that runs or not. Raises HypervisorError."""

    def call(connection: libvirt.virConnect) -> None:
        domain = connection.defineXML(xml)
        if autostart:
            domain.setAutostart(1)

    hypervisor_connection.once(uri, host, "storing the guest's definition", call, changes=True)


def stored(monitor: QmpMonitor) -> tuple[str, bool] | None:
    """The guest's stored definition with its passwords, and whether it starts with its host; None:
    there is none. Raises HypervisorError."""

    def call(domain: libvirt.virDomain) -> tuple[str, bool] | None:
        if not domain.isPersistent():
            return None
        text = domain.XMLDesc(_SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE)
        return text, bool(domain.autostart())

    return monitor.on_domain("reading the stored definition", call)


def undefine(monitor: QmpMonitor) -> None:
    """Forget the stored definition; a guest that runs goes on, and nothing can start it again.

    Fine if there is none. Raises HypervisorError.
    """

    def call(domain: libvirt.virDomain) -> None:
        if domain.isPersistent():
            domain.undefineFlags(_KEEP)

    monitor.on_domain("forgetting the stored definition", call, changes=True)


def links_up(monitor: QmpMonitor, cards: list[str]) -> None:
    """Let libvirt plug a guest's cards in that were started unplugged; each as its XML.

    Raises HypervisorError.
    """

    def call(domain: libvirt.virDomain) -> None:
        for card in cards:
            domain.updateDeviceFlags(card, libvirt.VIR_DOMAIN_AFFECT_LIVE)

    monitor.on_domain("plugging the network in", call, changes=True)


def forget_mark(monitor: QmpMonitor, namespace: str) -> None:
    """Take metadata away from a running guest; fine if there is none. Raises HypervisorError."""

    def call(domain: libvirt.virDomain) -> None:
        domain.setMetadata(
            libvirt.VIR_DOMAIN_METADATA_ELEMENT,
            None,
            "vmckpt",
            namespace,
            libvirt.VIR_DOMAIN_AFFECT_LIVE,
        )

    monitor.on_domain("taking the standby's mark away", call, changes=True)
