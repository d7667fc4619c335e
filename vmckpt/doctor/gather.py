"""Collect the facts that doctor checks, from all hosts in parallel."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from vmckpt.doctor.checks import FIRST_PORT, DeviceSeen, Examined, FenceSeen, HostReady
from vmckpt.errors import HypervisorError, RemoteError, VmckptError
from vmckpt.hypervisor import same_host
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.host_facts import host_facts
from vmckpt.model.fencing import Action, FenceTopology
from vmckpt.model.host import Host, HostFacts, HostProbe
from vmckpt.model.same_host import SameUuid
from vmckpt.remote import fence_agent, probe
from vmckpt.remote.ssh import Remote
from vmckpt.units import Bytes


async def examine(hosts: Sequence[Host], everyone: Sequence[Host]) -> list[Examined]:
    """Examine hosts in parallel. `everyone`: all hosts to which guests may migrate.

    A host that does not answer is not an error; the result contains the reason.
    """
    names = {one.name for one in hosts}
    others = [one for one in everyone if one.name not in names]
    found, known = await asyncio.gather(
        asyncio.gather(*(_one(host, everyone) for host in hosts)),
        asyncio.gather(*(_facts(host) for host in others)),
    )
    uuids = {one.host.name: one.facts.uuid for one in found if one.facts is not None}
    uuids |= {
        host.name: facts.uuid
        for host, (facts, _) in zip(others, known, strict=True)
        if facts is not None
    }
    same = await _with_same_uuid(everyone, uuids)
    return [dataclasses.replace(one, twins=twins_of(one.host.name, same)) for one in found]


async def _with_same_uuid(hosts: Sequence[Host], uuids: Mapping[str, str]) -> tuple[SameUuid, ...]:
    """Compare the hosts with the same UUID. `uuids`: UUIDs of the hosts that answer, by name."""
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(Hypervisor(host)) for host in hosts]
        return await same_host.among_known(opened, uuids)


def twins_of(name: str, same: Sequence[SameUuid]) -> tuple[SameUuid, ...]:
    """Return the results in `same` for pairs of names in which `name` is the first or second."""
    return tuple(one for one in same if name in (one.first, one.second))


async def _one(host: Host, everyone: Sequence[Host]) -> Examined:
    (facts, facts_error), seen, fence = await asyncio.gather(
        _facts(host), _over_ssh(host, everyone), _fence(host)
    )
    return dataclasses.replace(seen, facts=facts, facts_error=facts_error, fence=fence)


async def _fence(host: Host) -> FenceSeen | None:
    """Query the status of each fence device of a host. Returns None if the host has no devices.

    No device is switched on or off.
    """
    if host.fence is None:
        return None
    too_open = tuple(str(path) for path in fence_agent.too_open(host.fence))
    # Devices are queried one after the other, because some accept only one login at a time.
    devices = [await _device(host, host.fence, *place) for place in host.fence.places]
    return FenceSeen(devices=tuple(devices), too_open=too_open)


async def _device(host: Host, topology: FenceTopology, level: int, number: int) -> DeviceSeen:
    device = topology.levels[level][number]
    seen = DeviceSeen(name=topology.name(level, number), agent=device.agent, level=level)
    try:
        ran = await fence_agent.run(host, device, Action.STATUS, stop=asyncio.Event())
    except VmckptError as exc:
        return dataclasses.replace(seen, error=exc.message, hint=exc.hint)
    return dataclasses.replace(seen, ran=ran)


async def _over_ssh(host: Host, everyone: Sequence[Host]) -> Examined:
    if host.ssh is None:
        return Examined(host=host)
    others = [other for other in everyone if other.name != host.name]
    seen: HostProbe | None = None
    try:
        async with Remote(host) as remote:
            seen = await probe.probe_host(remote, host.storage)
            boots = await probe.kvm_boots(remote) if seen.kvm_device else None
            logins = {
                other.name: await probe.peer_login(remote, other.uri_for_peers) for other in others
            }
            ports = {
                other.name: await probe.reachable(remote, other.migration_address, FIRST_PORT)
                for other in others
                if other.migration_address is not None
            }
    except RemoteError as exc:
        return Examined(host=host, probe=seen, probe_error=exc.message, probe_hint=exc.hint)
    return Examined(host=host, probe=seen, kvm_boots=boots, logins=logins, ports=ports)


async def _facts(host: Host) -> tuple[HostFacts | None, str | None]:
    async with Hypervisor(host) as hypervisor:
        try:
            return await host_facts(hypervisor), None
        except HypervisorError as exc:
            return None, exc.message


# The script changes nothing. `test -w` also detects a read-only mount when it is run by root.
_SCRIPT = r"""
at=$1; shift
while [ ! -e "$at" ] && [ "$at" != / ]; do at=$(dirname "$at"); done
[ -d "$at" ] && [ -w "$at" ] && df -PB1 -- "$at" | awk 'NR==2 {print "room", $4}'
for store in "$@"; do
    if [ ! -f "$store/format" ]; then printf 'absent %s\n' "$store"
    elif [ ! -w "$store" ]; then printf 'closed %s\n' "$store"
    fi
done
"""
_WORDS = {"absent": "there is no store at {}", "closed": "{} is not writable"}


async def ask_host(
    host: Host, stores: Mapping[str, str], find_agent: Callable[[Host], Awaitable[object]]
) -> HostReady | None:
    """Collect the facts about a host that matter for snapshots.

    `stores`: the directories of stores, by store name. `find_agent` raises RemoteError if the host
    has no agent and the agent cannot be installed. Returns None if the host has no ssh address, or
    if ssh to the host fails.
    """
    if host.ssh is None:
        return None
    try:
        async with Remote(host) as remote:
            told = await remote.run(
                ["sh", "-s", "--", host.agent_state, *stores.values()], text=_SCRIPT
            )
    except RemoteError:
        return None  # `check_host` reports this error
    try:
        await find_agent(host)
        agent = None
    except RemoteError as exc:
        agent = exc.message.removeprefix(f"{host.name}: ")
    return parse_answer(host, stores, told.out, agent)


def parse_answer(host: Host, stores: Mapping[str, str], text: str, agent: str | None) -> HostReady:
    """Parse the output of `_SCRIPT`. `agent`: why the agent cannot be started, or None. Pure."""
    room: Bytes | None = None
    wrong: dict[str, str] = {}
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "room" and rest.isdecimal() and len(rest) < 19:
            room = Bytes(int(rest))
        elif word in _WORDS:
            wrong[rest] = _WORDS[word].format(rest)
    return HostReady(
        name=host.name, agent=agent, state=host.agent_state, room=room,
        stores={name: wrong.get(folder) for name, folder in stores.items()},
    )  # fmt: skip
