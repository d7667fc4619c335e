"""A talk with an agent on a host, from its order to its end."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from vmckpt.agent import agents
from vmckpt.agent.talk import error_from_json
from vmckpt.errors import RemoteError
from vmckpt.model.callers import Emit
from vmckpt.model.events import Copied
from vmckpt.model.hosts import Host
from vmckpt.remote.program import Program
from vmckpt.units import Bytes

Answer = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""Answers what an agent asks: the question, and what it is about."""


async def _nothing(_: str, __: Mapping[str, Any]) -> dict[str, Any]:
    return {"refused": "that is not what was ordered"}


async def carried_out(
    host: Host,
    order: Mapping[str, Any],
    emit: Emit,
    stop: asyncio.Event,
    answer: Answer = _nothing,
) -> dict[str, Any]:
    """Have an order carried out on a host; what the agent told at its end.

    Raises what the agent tells, and RemoteError if it ended without a word: then nobody knows how
    far it came.
    """
    async with Program(host, await agents.known(host)) as agent:
        await agent.tell(order)
        stopping = asyncio.create_task(_pass_on(stop, agent))
        try:
            while True:
                told = await agent.hear()
                if "done" in told:
                    return dict(told["done"])
                if "error" in told:
                    raise error_from_json(told["error"], host.name)
                if "ask" in told:
                    await agent.tell(await answer(str(told["ask"]), told.get("about", {})))
                elif "progress" in told:
                    emit(_copied(told["progress"]))
        finally:
            stopping.cancel()


async def _pass_on(stop: asyncio.Event, agent: Program) -> None:
    await stop.wait()
    with suppress(RemoteError):
        await agent.tell({"stop": True})


def _copied(told: Mapping[str, Any]) -> Copied:
    total = told.get("total")
    return Copied(
        phase=str(told.get("phase")),
        done=Bytes(int(told.get("done", 0))),
        total=None if total is None else Bytes(int(total)),
        new=Bytes(int(told.get("new", 0))),
    )
