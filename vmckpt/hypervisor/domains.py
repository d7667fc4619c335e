"""Guests of a host: find, describe, define, start, save, restore, label, resume and remove them."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from xml.etree import ElementTree as ET

import libvirt

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import block, domain_xml, storage
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.qmp import DomainCaller
from vmckpt.model.disk import DiskFacts
from vmckpt.model.guest import Guest, GuestJob, GuestState, Presence
from vmckpt.units import Seconds

_JOBS = {
    libvirt.VIR_DOMAIN_JOB_OPERATION_START: GuestJob.START,
    libvirt.VIR_DOMAIN_JOB_OPERATION_SAVE: GuestJob.SAVE,
    libvirt.VIR_DOMAIN_JOB_OPERATION_RESTORE: GuestJob.RESTORE,
    libvirt.VIR_DOMAIN_JOB_OPERATION_MIGRATION_IN: GuestJob.INCOMING,
    libvirt.VIR_DOMAIN_JOB_OPERATION_MIGRATION_OUT: GuestJob.OUTGOING,
    libvirt.VIR_DOMAIN_JOB_OPERATION_SNAPSHOT: GuestJob.SNAPSHOT,
    libvirt.VIR_DOMAIN_JOB_OPERATION_SNAPSHOT_REVERT: GuestJob.REVERT,
    libvirt.VIR_DOMAIN_JOB_OPERATION_DUMP: GuestJob.DUMP,
    libvirt.VIR_DOMAIN_JOB_OPERATION_BACKUP: GuestJob.BACKUP,
}
_POST_COPY = (
    (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_POSTCOPY),
    (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_POSTCOPY_FAILED),
    (libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_RUNNING_POSTCOPY),
    (libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_RUNNING_POSTCOPY_FAILED),
)
_HELD = (
    (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_MIGRATION),
    # QEMU was started for an incoming migration that is not complete.
    (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_STARTING_UP),
)
# Paused through QMP and not by libvirt, as a protected guest is in each epoch.
_STOPPED_BY_QEMU = (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_UNKNOWN)
_EPOCH_PAUSE = Seconds(0.07)
_LOOKS = 5
UNKNOWN_JOB = "unknown"
_MIGRATIONS = (GuestJob.INCOMING, GuestJob.OUTGOING)


async def all_guests(hypervisor: Hypervisor) -> list[Guest]:
    """Return all guests of the host, sorted by name. Raises HypervisorError."""

    def read(connection: libvirt.virConnect) -> list[Guest]:
        found = []
        for domain in connection.listAllDomains():
            with suppress(libvirt.libvirtError):  # the guest disappeared meanwhile
                found.append(described(domain))
        return sorted(found, key=lambda guest: guest.name)

    return await hypervisor.query("listing guests", read)


async def find_guest(hypervisor: Hypervisor, name: str) -> Guest | None:
    """Return the guest with this name or UUID; None if the host has no such guest.

    Raises HypervisorError.
    """

    def read(connection: libvirt.virConnect) -> Guest | None:
        domain = _lookup(connection, name)
        return None if domain is None else described(domain)

    return await hypervisor.query(f"looking for guest {name}", read)


async def presence(hypervisor: Hypervisor, uuid: str) -> Presence:
    """Return what the host reports about a guest.

    If the query fails for any reason, the host is returned as unreachable.
    """

    def read(connection: libvirt.virConnect) -> Presence:
        domain = _lookup(connection, uuid)
        if domain is None:
            return Presence(reachable=True)
        state, reason = domain.state()
        known = domain_xml.STATES.get(state)
        if domain.isActive() and (known is None or not known.is_active):
            known = GuestState.PAUSED  # QEMU crashed and was kept, or its state is not known yet
        return Presence(
            reachable=True,
            state=known,
            resumed=state == libvirt.VIR_DOMAIN_RUNNING
            and reason == libvirt.VIR_DOMAIN_RUNNING_MIGRATION_CANCELED,
            held=(state, reason) in _HELD,
            post_copy=(state, reason) in _POST_COPY,
            # An unknown job may be a migration: a false positive only costs another query.
            migrating=_job(domain) in (*_MIGRATIONS, UNKNOWN_JOB),
        )

    try:
        return await hypervisor.query(f"looking for guest {uuid}", read)
    except HypervisorError:
        return Presence(reachable=False)


async def define_and_start(hypervisor: Hypervisor, xml: str) -> None:
    """Define a guest and start it; undefine it again if it does not start.

    Raises HypervisorError, OutcomeUnknown, ReadOnly.
    """

    def change(connection: libvirt.virConnect) -> None:
        domain = connection.defineXML(xml)
        try:
            domain.create()
        except libvirt.libvirtError:
            domain.undefine()
            raise

    await hypervisor.execute("starting a guest", change)


async def define(hypervisor: Hypervisor, xml: str) -> str:
    """Define a guest. Returns the definition as completed by libvirt, valid for a save image.

    Raises HypervisorError, OutcomeUnknown, ReadOnly.
    """

    def change(connection: libvirt.virConnect) -> str:
        flags = libvirt.VIR_DOMAIN_XML_MIGRATABLE | libvirt.VIR_DOMAIN_XML_INACTIVE
        return connection.defineXML(xml).XMLDesc(flags)

    return await hypervisor.execute("defining a guest", change)


async def start_transient(hypervisor: Hypervisor, xml: str) -> None:
    """Start a transient guest: libvirt does not keep its definition.

    Raises HypervisorError, OutcomeUnknown, ReadOnly.
    """

    def change(connection: libvirt.virConnect) -> None:
        connection.createXML(xml, 0)

    await hypervisor.execute("starting a guest", change)


async def save(hypervisor: Hypervisor, name: str, path: str) -> None:
    """Save a guest's memory and device state to a save image, and stop the guest.

    Raises HypervisorError, OutcomeUnknown, ReadOnly.
    """

    def change(connection: libvirt.virConnect) -> None:
        connection.lookupByName(name).save(path)

    await hypervisor.execute_long(f"saving guest {name}", change)


async def restore(hypervisor: Hypervisor, path: str, xml: str) -> None:
    """Start a guest from a save image, which may be a FIFO, with the definition `xml`.

    Raises HypervisorError, OutcomeUnknown, ReadOnly.
    """

    def change(connection: libvirt.virConnect) -> None:
        connection.restoreFlags(path, xml, libvirt.VIR_DOMAIN_SAVE_RUNNING)

    await hypervisor.execute_long("restoring a guest", change)


async def versions(hypervisor: Hypervisor) -> tuple[int, int]:
    """Return the versions of the host's libvirt and QEMU in libvirt's encoding.

    7002022 is 7.2.22. Raises HypervisorError.
    """
    return await hypervisor.query(
        "reading versions",
        lambda connection: (connection.getLibVersion(), connection.getVersion()),
    )


async def set_labels(hypervisor: Hypervisor, name: str, labels: Mapping[str, str]) -> None:
    """Replace a guest's labels, which are part of its definition and move with the guest.

    `name`: the guest's name or UUID. Raises HypervisorError, also if there is no such guest;
    BadInput for control characters; OutcomeUnknown, ReadOnly.
    """

    def change(connection: libvirt.virConnect) -> None:
        domain = _lookup(connection, name)
        if domain is None:
            host = hypervisor.host.name
            raise HypervisorError(f"no guest {name!r} on {host}", host=host)
        flags = libvirt.VIR_DOMAIN_AFFECT_CONFIG if domain.isPersistent() else 0
        flags |= libvirt.VIR_DOMAIN_AFFECT_LIVE if domain.isActive() else 0
        kind = libvirt.VIR_DOMAIN_METADATA_ELEMENT
        text = domain_xml.labels_xml(labels) if labels else None
        domain.setMetadata(kind, text, "vmckpt", domain_xml.LABELS, flags)

    await hypervisor.execute(f"labelling guest {name}", change)


async def remove(hypervisor: Hypervisor, name: str) -> None:
    """Destroy a guest and undefine it. Does nothing if the host has no such guest.

    Also deletes the guest's NVRAM file, and libvirt's metadata of its snapshots and checkpoints.
    `name`: the guest's name or UUID. Raises HypervisorError, OutcomeUnknown, ReadOnly.
    """

    def change(connection: libvirt.virConnect) -> None:
        domain = _lookup(connection, name)
        if domain is None:
            return
        persistent = domain.isPersistent()
        if domain.isActive():
            domain.destroy()
        if persistent:
            domain.undefineFlags(
                libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
                | libvirt.VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA
                | libvirt.VIR_DOMAIN_UNDEFINE_NVRAM
            )

    await hypervisor.execute(f"removing guest {name}", change)


async def resume(hypervisor: Hypervisor, uuid: str) -> None:
    """Resume a guest if it is paused. Raises HypervisorError, OutcomeUnknown, ReadOnly."""

    def change(connection: libvirt.virConnect) -> None:
        domain = connection.lookupByUUIDString(uuid)
        if domain.state()[0] == libvirt.VIR_DOMAIN_PAUSED:
            domain.resume()

    await hypervisor.execute("resuming a guest", change)


async def end(hypervisor: Hypervisor, uuid: str) -> None:
    """Destroy a guest, like a power cut. Does nothing if the guest is not running.

    Raises HypervisorError, OutcomeUnknown, ReadOnly.
    """

    def change(connection: libvirt.virConnect) -> None:
        domain = _lookup(connection, uuid)
        if domain is not None and domain.isActive():
            domain.destroy()

    await hypervisor.execute("destroying a guest", change)


def _lookup(connection: libvirt.virConnect, name: str) -> libvirt.virDomain | None:
    """Look up a domain by UUID if `name` has the form of a UUID, otherwise by name.

    A UUID is never looked up as a name: a guest's name can be the UUID of another guest.
    """
    if domain_xml.not_in_xml(name):
        return None  # no guest can have such a name, and libvirt's calls do not accept it
    by_uuid = domain_xml.UUID.fullmatch(name) is not None
    try:
        return connection.lookupByUUIDString(name) if by_uuid else connection.lookupByName(name)
    except libvirt.libvirtError as exc:
        if exc.get_error_code() not in (libvirt.VIR_ERR_NO_DOMAIN, libvirt.VIR_ERR_INVALID_ARG):
            raise
    return None


def described(domain: libvirt.virDomain) -> Guest:
    """Describe a domain. Raises libvirtError if it is gone, ValueError if its XML is invalid."""
    return domain_xml.guest(
        domain.XMLDesc(),
        state=state_of(domain)[0],
        persistent=bool(domain.isPersistent()),
        autostart=bool(domain.autostart()),
        snapshots=domain.snapshotNum(),
        job=_job(domain),
        saved=not domain.isActive() and bool(domain.hasManagedSaveImage()),
    )


def state_of(domain: libvirt.virDomain) -> tuple[int, int]:
    """Return a domain's state and reason from libvirt. Raises libvirtError if it is gone.

    A protected guest is paused for some milliseconds in each epoch. To skip this pause, the state
    is read up to five times.
    """
    for _ in range(_LOOKS):
        state, reason = domain.state()
        if (state, reason) != _STOPPED_BY_QEMU:
            return state, reason
        time.sleep(_EPOCH_PAUSE)
    return _STOPPED_BY_QEMU


def _job(domain: libvirt.virDomain) -> str | None:
    """Return the guest's job; UNKNOWN_JOB if libvirt fails, for example if QEMU's monitor is busy.

    Returns None if the guest has no job or is off, or if libvirt does not support jobs.
    """
    if not domain.isActive():
        return None
    try:
        stats = domain.jobStats()
    except libvirt.libvirtError as exc:
        if exc.get_error_code() == libvirt.VIR_ERR_OPERATION_UNSUPPORTED:
            return None
        return UNKNOWN_JOB
    if stats.get("type", libvirt.VIR_DOMAIN_JOB_NONE) == libvirt.VIR_DOMAIN_JOB_NONE:
        return None
    return _JOBS.get(int(stats.get(libvirt.VIR_DOMAIN_JOB_OPERATION, 0)), UNKNOWN_JOB)


def up(caller: DomainCaller) -> None:
    """Bring up the links of all network cards. Raises HypervisorError, OutcomeUnknown."""

    def change(domain: libvirt.virDomain) -> None:
        for card in domain_xml.tree(domain.XMLDesc(), "domain").findall("devices/interface"):
            link = card.find("link")
            if link is not None and link.get("state") == "down":
                link.set("state", "up")
                text = ET.tostring(card, encoding="unicode")
                domain.updateDeviceFlags(text, libvirt.VIR_DOMAIN_AFFECT_LIVE)

    caller.on_domain("bringing up the guest's links", change, changes=True)


_SECURE = libvirt.VIR_DOMAIN_XML_SECURE
_STORED = _SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A guest's stored definition, and its live definition if the guest is running."""

    text: str
    """The stored definition, exactly as returned by libvirt."""
    running: ET.Element | None
    """The live definition; None: the guest is off."""
    disks: tuple[DiskFacts, ...]


async def stored_definition(hypervisor: Hypervisor, uuid: str) -> Definition:
    """Read a guest's stored and live definitions, with passwords, and its disks.

    Raises HypervisorError, also if the guest has no stored definition.
    """

    def look(connection: libvirt.virConnect) -> Definition | None:
        domain = connection.lookupByUUIDString(uuid)
        if not domain.isPersistent():
            return None
        active = bool(domain.isActive())
        known = block.nodes(domain) if active else {}
        text = domain.XMLDesc(_STORED)
        return Definition(
            text=text,
            running=domain_xml.tree(domain.XMLDesc(_SECURE), "domain") if active else None,
            disks=block.read_facts(storage.definition(domain), known),
        )

    found = await hypervisor.query("reading the guest's definition", look)
    if found is None:
        name = hypervisor.host.name
        raise HypervisorError(
            f"{name}: guest {uuid} is transient and has no stored definition to change",
            host=name,
            hint="define it with virsh define FILE",
        )
    return found


async def write(hypervisor: Hypervisor, uuid: str, xml: str, *, instead_of: str) -> None:
    """Replace a guest's stored definition. A running guest is not affected.

    `instead_of`: the stored definition that was read before. Raises HypervisorError, also if the
    definition has changed since then; OutcomeUnknown, ReadOnly.
    """

    def change(connection: libvirt.virConnect) -> bool:
        if connection.lookupByUUIDString(uuid).XMLDesc(_STORED) != instead_of:
            return False
        connection.defineXML(xml)
        return True

    if not await hypervisor.execute("changing the guest's definition", change):
        name = hypervisor.host.name
        raise HypervisorError(
            f"{name}: the guest's definition has changed in the meantime; nothing was done",
            host=name,
            hint="try again",
        )


_WHOLE = libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE


@dataclass(frozen=True, slots=True)
class Found:
    """A guest's state and definition on a host."""

    active: bool
    stored: str | None
    """The guest's stored definition with passwords, and volumes of storage pools given by path;
    None: the guest is transient.
    """


async def inspect_guest(hypervisor: Hypervisor, uuid: str) -> Found | None:
    """Return a guest's state and stored definition; None if the host has no such guest.

    Raises HypervisorError.
    """

    def read(connection: libvirt.virConnect) -> Found | None:
        domain = _found(connection, uuid)
        return None if domain is None else Found(bool(domain.isActive()), _text(domain))

    return await hypervisor.query("reading the guest's definition", read)


async def put_right(
    hypervisor: Hypervisor, uuid: str, decide: Callable[[str | None], str | None]
) -> bool:
    """Store a definition derived from the stored definition. A running guest is not affected.

    `decide` gets the stored definition, in which volumes of storage pools are given by path, or
    None if the host has none. It returns the definition to store, or None to change nothing.
    Returns whether a definition was stored. Raises HypervisorError, OutcomeUnknown, ReadOnly.
    """

    def change(connection: libvirt.virConnect) -> bool:
        domain = _found(connection, uuid)
        wanted = decide(None if domain is None else _text(domain))
        if wanted is not None:
            connection.defineXML(wanted)
        return wanted is not None

    return await hypervisor.execute("storing the guest's definition", change)


def _found(connection: libvirt.virConnect, uuid: str) -> libvirt.virDomain | None:
    try:
        return connection.lookupByUUIDString(uuid)
    except libvirt.libvirtError as exc:
        if exc.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
            return None
        raise


def _text(domain: libvirt.virDomain) -> str | None:
    return storage.definition(domain, _WHOLE) if domain.isPersistent() else None
