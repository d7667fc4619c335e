"""Ask the target for everything that the guest's definition names: a dry start."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from vmckpt.definition.host_resources import Kind
from vmckpt.definition.needs import Answer, Answers, Resource
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import dry_start
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.migration_source import SourceAnswers
from vmckpt.remote.ssh import Remote
from vmckpt.remote.target_probe import TargetProbe, look_at_target
from vmckpt.units import Bytes

PATHS = (Kind.FILE, Kind.DIRECTORY, Kind.DEVICE, Kind.SOCKET)
"""Kinds of resources that are paths on the host."""
_PROBED = (Kind.ADDRESS, Kind.PORT, Kind.HUGE_PAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAnswers:
    """The answers of the target's libvirt."""

    resources: Answers = field(default_factory=dict)
    refused: str | None = None
    """Why the target's libvirt would not start the guest; None if no reason is known."""


async def ask_libvirt(target: Hypervisor, source: SourceAnswers) -> TargetAnswers:
    """Ask the target's libvirt for the guest's resources, and whether it would start the guest.

    Unknown answers are left out.
    """
    if not source.xml:
        return TargetAnswers()  # the source did not answer, or the guest is off
    try:
        resources, refused = await asyncio.gather(
            dry_start.ask(target, source.needs), dry_start.refusal(target, source.xml)
        )
    except HypervisorError:
        return TargetAnswers()  # preflight reports a target that does not answer
    return TargetAnswers(resources=resources, refused=refused)


def paths(needs: Sequence[Resource]) -> frozenset[str]:
    """Return the paths that the guest needs on the target, and files that replace a resource."""
    own = {one.name for one in needs if one.kind in PATHS}
    return frozenset(own | {one.unless for one in needs if one.unless is not None})


async def probe(target: Remote, needs: Sequence[Resource]) -> TargetProbe | None:
    """Probe the target over ssh if the guest needs anything that only a probe shows, else None.

    Raises RemoteError or HostKeyRefused.
    """
    if any(one.kind in _PROBED for one in needs):
        return await look_at_target(target)
    return None


def combine(
    needs: Sequence[Resource], by_libvirt: Answers, on_target: Mapping[str, bool],
    probed: TargetProbe | None, memory: Bytes,
) -> Answers:  # fmt: skip
    """Return all answers of the target. Pure.

    `on_target`: whether a path exists; `probed`: None if the host was not probed; `memory`: size
    of the guest's memory, in bytes.
    """
    found = dict(by_libvirt)
    for one in needs:
        answer = None
        if one.kind in PATHS and one.name in on_target:
            answer = on_target[one.name]
        elif probed is not None and one.kind in _PROBED:
            answer = _probed(one, probed, memory)
        if answer is not None:
            found[one] = Answer.PRESENT if answer else Answer.ABSENT
        if one.unless is not None and one.unless in on_target:
            instead = Resource(kind=Kind.FILE, name=one.unless)
            found[instead] = Answer.PRESENT if on_target[one.unless] else Answer.ABSENT
    return found


def _probed(wanted: Resource, probed: TargetProbe, memory: Bytes) -> bool | None:
    """Return whether the target has an address, a free port or enough huge pages.

    None if this is unknown.
    """
    match wanted.kind:
        case Kind.ADDRESS:
            return _has_address(wanted.name, probed)
        case Kind.PORT:
            return int(wanted.name) not in probed.ports
        case _:
            size = int(wanted.name) if wanted.name else probed.default_page
            free = None if size is None else probed.free_pages.get(size, Bytes(0))
            return None if free is None else free >= memory


def _has_address(name: str, probed: TargetProbe) -> bool | None:
    try:
        address = ip_address(name)
    except ValueError:
        return None  # a host name, which the target resolves itself
    if probed.any_address or not probed.addresses or address.is_loopback:
        return True
    return str(address) in probed.addresses
