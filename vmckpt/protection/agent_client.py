"""Send short orders to the agents of a protection, and read their answers."""

import asyncio
from collections.abc import Mapping
from typing import Any

from vmckpt.agent import client
from vmckpt.agent.orders import ReplicaOrder
from vmckpt.errors import RemoteError, VmckptError
from vmckpt.model.events import Event
from vmckpt.model.host import Host
from vmckpt.protection import agent_answers
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer
from vmckpt.units import Seconds

_ANSWERS = Seconds(20.0)
"""How long to wait for an answer. Even on a busy host, login and answer take less time."""


def _nobody(_: Event) -> None:
    pass


async def order(host: Host, guest: str, what: str, **more: Any) -> dict[str, Any]:
    """Run a short order on a host. Returns the agent's answer. Raises VmckptError.

    `guest`: a UUID; `what`: the name of the order; `more`: its other fields.
    """
    told = ReplicaOrder(what=what, guest=guest, uri=client.LIBVIRT, host=host.name, **more)
    answer = await client.run_order(host, told.as_json(), _nobody, asyncio.Event())
    with client.sensible(host):
        agent_answers.require_answers(what, answer)
    return answer


async def request(host: Host, guest: str, **more: Any) -> ProtectionStatus:
    """Query an agent's status, or pass a request to the agent, which answers immediately.

    `guest`: the guest's UUID; `more`: fields of the order, such as the request. Raises VmckptError,
    also if the answer is overdue: if the host dies meanwhile, TCP reports an error only after about
    15 minutes.
    """
    asked = asyncio.create_task(order(host, guest, "ask", **more))
    try:
        await asyncio.wait([asked], timeout=_ANSWERS)
        if not asked.done():
            raise RemoteError(f"{host.name} did not answer within {_ANSWERS:g} s", host=host.name)
        return parse_answer(asked.result())
    finally:
        asked.cancel()  # the connection closes by itself


async def status(host: Host, guest: str) -> ProtectionStatus:
    """Return the agent's status, with an `error` if the host cannot be queried."""
    try:
        return await request(host, guest)
    except VmckptError as exc:
        remote = isinstance(exc, RemoteError)
        silent = isinstance(exc, RemoteError) and exc.silent
        return parse_answer({"error": str(exc), "unreachable": remote, "silent": silent})


async def both(
    hosts: Mapping[str, Host], guest: str, limit: Seconds | None = None
) -> dict[str, ProtectionStatus]:
    """Return the status of a guest's protection from each host, by host name.

    Hosts that report no protection of the guest are left out. `limit`: how long to wait; a host
    that has not answered by then is reported as unreachable. Without a limit, a link that breaks
    meanwhile is noticed only when ssh times out.
    """
    asked = {name: asyncio.create_task(status(host, guest)) for name, host in hosts.items()}
    try:
        if asked:
            await asyncio.wait(asked.values(), timeout=limit)
        told = {
            name: one.result() if one.done() else unreachable(f"{name} does not answer")
            for name, one in asked.items()
        }
    finally:
        for one in asked.values():
            one.cancel()
    return {name: one for name, one in told.items() if not one.knows_nothing}


def unreachable(why: str) -> ProtectionStatus:
    """Return the status of a host that does not answer."""
    return parse_answer({"error": why, "unreachable": True})


def kept_in(host: Host, guest: str) -> str:
    """Return the host's directory for a protection's files that survive a reboot.

    `guest`: the guest's UUID.
    """
    return f"{host.agent_state}/replica-{guest}"
