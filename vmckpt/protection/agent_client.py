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


async def request(host: Host, guest: str, **more: Any) -> dict[str, Any]:
    """Ask an agent, or wish something of it, which it answers at once.

    Raises VmckptError, also if it has not answered in time: a host that dies in the middle of a
    question would else be waited for until TCP gives it up, a quarter of an hour later.
    """
    asked = asyncio.create_task(order(host, guest, "ask", **more))
    try:
        await asyncio.wait([asked], timeout=_ANSWERS)
        if not asked.done():
            raise RemoteError(f"{host.name} has not answered for {_ANSWERS:g} s")
        return asked.result()
    finally:
        asked.cancel()  # its connection is left to end by itself


async def status(host: Host, guest: str) -> dict[str, Any]:
    """What the agent there says; {"error", "silent"} if the host cannot be asked. Silent is who
    does not even take a call."""
    try:
        return await request(host, guest)
    except VmckptError as exc:
        unreachable = isinstance(exc, RemoteError)
        silent = isinstance(exc, RemoteError) and exc.silent
        return {"error": str(exc), "unreachable": unreachable, "silent": silent}


async def both(
    hosts: Mapping[str, Host], guest: str, limit: Seconds | None = None
) -> dict[str, dict[str, Any]]:
    """What all hosts say of a guest's protection, by name; only those that know of one.

    `limit`: who has said nothing by then is silent; a link that is cut in the middle of a question
    would else be waited for until ssh gives it up.
    """
    asked = {name: asyncio.create_task(status(host, guest)) for name, host in hosts.items()}
    try:
        if asked:
            await asyncio.wait(asked.values(), timeout=limit)
        told = {name: one.result() if one.done() else silent(name) for name, one in asked.items()}
    finally:
        for one in asked.values():
            one.cancel()
    return {name: one for name, one in told.items() if one.get("role") or "error" in one}


def silent(name: str) -> dict[str, Any]:
    """What is known of a host that says nothing."""
    return {"error": f"{name} is silent", "unreachable": True}


def kept_in(host: Host, guest: str) -> str:
    """Where a host keeps what outlives a reboot of the protection of a guest (a UUID)."""
    return f"{host.agent_state}/replica-{guest}"
