"""A talk with an agent on a host, from its order to its end."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from vmckpt.agent import agents
from vmckpt.agent.talk import error_from_json
from vmckpt.errors import RemoteError
from vmckpt.model.events import Copied, Emit
from vmckpt.model.host import Host
from vmckpt.remote.agent_channel import Program
from vmckpt.units import Bytes, Seconds

_AGES, _LARGEST = 1e9, 1 << 62
_TEXTS, _TEXT = 100, 2000
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

    Raises what the agent tells, and RemoteError if it ended without a word, or tells what makes no
    sense: then it is unknown how far it came.
    """
    async with Program(host, await agents.known(host)) as agent:
        await agent.tell(order)
        stopping = asyncio.create_task(_pass_on(stop, agent))
        try:
            while True:
                told = await agent.hear()
                with sensible(host):
                    if "done" in told:
                        return _mapping(told["done"])
                    if "error" in told:
                        raise error_from_json(_mapping(told["error"]), host.name)
                    if "ask" in told:
                        about = _mapping(told.get("about", {}))
                        await agent.tell(await answer(str(told["ask"]), about))
                    elif "progress" in told:
                        emit(_copied(_mapping(told["progress"])))
        finally:
            stopping.cancel()


@contextmanager
def sensible(host: Host) -> Iterator[None]:
    """While what an agent told is read: a host may tell anything.

    Raises RemoteError where it is not what was asked for.
    """
    try:
        yield
    except (
        TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError
    ) as exc:  # fmt: skip
        why = str(exc)[:80]
        raise RemoteError(
            f"{host.name}: what its agent tells makes no sense: {why!r}",
            mend=f"see that vmckpt is the same version there; vmckpt doctor {host.name}",
        ) from exc


def seconds(told: object) -> Seconds:
    """A time that an agent tells. Raises ValueError."""
    return Seconds(_number(told, _AGES))


def size(told: object) -> Bytes:
    """A number of bytes that an agent tells. Raises ValueError."""
    return Bytes(int(_number(told, _LARGEST)))


def texts(told: object) -> tuple[str, ...]:
    """Texts that an agent tells, no more of them than can be read. Raises TypeError."""
    if not isinstance(told, list):
        raise TypeError(f"{str(told)[:40]!r} in the place of a list")
    return tuple(str(one)[:_TEXT] for one in told[:_TEXTS])


def _number(told: object, most: float) -> float:
    if isinstance(told, bool) or not isinstance(told, int | float) or not 0 <= told <= most:
        raise ValueError(f"{str(told)[:40]!r} in the place of a number")
    return told


def _mapping(told: object) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise TypeError(f"{str(told)[:40]!r} in the place of names and values")
    return told


async def _pass_on(stop: asyncio.Event, agent: Program) -> None:
    await stop.wait()
    with suppress(RemoteError):
        await agent.tell({"stop": True})


def _copied(told: Mapping[str, Any]) -> Copied:
    total = told.get("total")
    return Copied(
        phase=str(told.get("phase"))[:_TEXT],
        done=size(told.get("done", 0)),
        total=None if total is None else size(total),
        new=size(told.get("new", 0)),
    )
