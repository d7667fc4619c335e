"""What a protection's agents are asked and told, one short order at a time."""

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
"""More than a login and a busy host's agent ever take."""


def _nobody(_: Event) -> None:
    pass


async def order(host: Host, guest: str, what: str, **more: Any) -> dict[str, Any]:
    """Have a short order carried out; what the agent answers. Raises VmckptError."""
    told = ReplicaOrder(what=what, guest=guest, uri=client.LIBVIRT, host=host.name, **more)
    answer = await client.run_order(host, told.as_json(), _nobody, asyncio.Event())
    with client.sensible(host):
        agent_answers.require_answers(what, answer)
    return answer


async def request(host: Host, guest: str, **more: Any) -> ProtectionStatus:
    """Ask an agent, or wish something of it, which it answers at once.

    Raises VmckptError, also if it has not answered in time: a host that dies in the middle of a
    question would else be waited for until TCP gives it up, a quarter of an hour later.
    """
    asked = asyncio.create_task(order(host, guest, "ask", **more))
    try:
        await asyncio.wait([asked], timeout=_ANSWERS)
        if not asked.done():
            raise RemoteError(f"{host.name} has not answered for {_ANSWERS:g} s")
        return parse_answer(asked.result())
    finally:
        asked.cancel()  # its connection is left to end by itself


async def status(host: Host, guest: str) -> ProtectionStatus:
    """What the agent there says; an `error` if the host cannot be asked."""
    try:
        return await request(host, guest)
    except VmckptError as exc:
        remote = isinstance(exc, RemoteError)
        silent = isinstance(exc, RemoteError) and exc.silent
        return parse_answer({"error": str(exc), "unreachable": remote, "silent": silent})


async def both(
    hosts: Mapping[str, Host], guest: str, limit: Seconds | None = None
) -> dict[str, ProtectionStatus]:
    """What all hosts say of a guest's protection, by name; only those that know of one.

    `limit`: who has said nothing by then is silent; a link that is cut in the middle of a question
    would else be waited for until ssh gives it up.
    """
    asked = {name: asyncio.create_task(status(host, guest)) for name, host in hosts.items()}
    try:
        if asked:
            await asyncio.wait(asked.values(), timeout=limit)
        told = {
            name: one.result() if one.done() else unreachable(f"{name} is silent")
            for name, one in asked.items()
        }
    finally:
        for one in asked.values():
            one.cancel()
    return {name: one for name, one in told.items() if not one.knows_nothing}


def unreachable(why: str) -> ProtectionStatus:
    """What is known of a host that says nothing."""
    return parse_answer({"error": why, "unreachable": True})


def kept_in(host: Host, guest: str) -> str:
    """Where a host keeps what outlives a reboot of the protection of a guest (a UUID)."""
    return f"{host.agent_state}/replica-{guest}"
