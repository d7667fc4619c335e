"""Check whether a host can run a snapshot, before the existing guest is touched."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from vmckpt.errors import BadInput, RemoteError
from vmckpt.hypervisor import domains
from vmckpt.hypervisor import host_facts as host_host_facts
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.finding import Severity
from vmckpt.model.host import Host
from vmckpt.remote import probe
from vmckpt.remote.ssh import Remote
from vmckpt.snapshot.request import RestoreRequest
from vmckpt.snapshot.restore import compatibility, domain_xml, xml_safety
from vmckpt.snapshot.restore.compatibility import Side
from vmckpt.snapshot.restore.xml_safety import Here
from vmckpt.store.format.metadata import Public
from vmckpt.store.format.private_part import Private


async def checked(hypervisor: Hypervisor, public: Public, private: Private) -> tuple[str, ...]:
    """Check that a host can run a snapshot. Returns warnings.

    Raises BadInput with all blockers, and HypervisorError.
    """
    host = hypervisor.host.name
    try:
        guest = domain_xml.guest_of(private.facts.domain_xml)
    except ValueError as exc:
        raise BadInput(f"snapshot {public.id}: invalid guest definition: {exc}") from exc
    facts = await host_host_facts.host_facts(hypervisor)
    nets = {one.source for one in guest.nics if one.kind == "network" and one.source is not None}
    drives = domain_xml.drives(private.facts.domain_xml)
    # The sizes of existing images do not matter, as each image is created again.
    side = Side(
        host=host,
        facts=facts,
        cpu_fits=await host_host_facts.cpu_fits(hypervisor, guest),
        on_host=await _present(hypervisor.host, [*private.facts.boot_files, *drives.values()]),
        drives=drives,
        no_networks=sorted(nets - facts.networks),
    )
    found = compatibility.check_compatibility(public, private.facts, private.files, side)
    against = [one.text for one in found if one.severity is Severity.BLOCKER]
    if against:
        raise BadInput(f"{public.id} cannot be restored on {host}: {'; '.join(against)}")
    return tuple(one.text for one in found if one.severity is Severity.WARNING)


async def bounded(
    hypervisor: Hypervisor, public: Public, private: Private, *, xml: str,
    images: Mapping[str, str], folder: str | None,
) -> None:  # fmt: skip
    """Check that a snapshot's definition uses only host resources that the guest may use.

    `xml` is the definition with its disks at `images`; `folder` is the directory that the operator
    chose for the disks. Raises BadInput with all violations, and HypervisorError.
    """
    host = hypervisor.host
    here = await _here_is(hypervisor, public, folder)
    try:
        reasons = xml_safety.unsafe_references(xml, images, private.facts.disks, here)
    except ValueError as exc:
        raise BadInput(f"snapshot {public.id}: invalid guest definition: {exc}") from exc
    if reasons:
        raise BadInput(
            f"refusing to restore {public.id} on {host.name}: {'; '.join(reasons)}",
            hint=f"if this is intended, add the directory to {host.name}'s storage in the"
            f" inventory, define {public.guest} there first with the resources that it may use, or"
            " use --trust-definition",
        )


async def usable_bases(
    hypervisor: Hypervisor, public: Public, private: Private, request: RestoreRequest,
    unknown: str | None,
) -> dict[str, tuple[str, str, str]]:  # fmt: skip
    """Return path and format of the base image of each captured disk, and why it must not be used.

    The reason is empty if the image may be used.

    QEMU reads a base image, and libvirt may change its owner, so it must be in a directory that the
    guest may use. `unknown`: a host that did not report its images; None: all did.
    Raises HypervisorError.
    """
    found = domain_xml.bases(private.facts.domain_xml)
    captured = {disk.target for disk in private.facts.disks}
    here = None
    if not request.trust_definition and found.keys() & captured:
        here = await _here_is(hypervisor, public, request.folder)
    bases = {}
    for target, (path, format_) in found.items():
        why = "" if unknown is None else f"{unknown} does not answer, and may use it as a disk"
        if here is not None and not here.holds(path):
            why = f"it is outside the storage directories of {hypervisor.host.name}"
        if target in captured:
            bases[target] = (path, format_, why)
    return bases


async def _here_is(hypervisor: Hypervisor, public: Public, folder: str | None) -> Here:
    known = await domains.inspect_guest(hypervisor, public.guest_uuid)
    return Here(
        host=hypervisor.host.name,
        definition=known.stored if known is not None else None,
        storage=(*hypervisor.host.storage, *((folder,) if folder else ())),
    )


async def _present(host: Host, files: Sequence[str]) -> dict[str, bool]:
    """Return whether each file is on the host; empty if the host cannot be queried."""
    if not files:
        return {}
    if host.ssh is None:
        return await asyncio.to_thread(_here, files)
    try:
        async with Remote(host) as remote:
            return await probe.present(remote, files)
    except RemoteError:
        return {}


def _here(files: Sequence[str]) -> dict[str, bool]:
    return {one: Path(one).exists() for one in files}
