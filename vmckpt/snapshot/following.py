"""A guest's line of snapshots goes on where the guest has moved to: its state is fetched."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from vmckpt.agent import client
from vmckpt.agent.snapshot.transfer_parent_state import LineOrder
from vmckpt.errors import VmckptError
from vmckpt.journal.records import Operation
from vmckpt.model.events import Event
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.units import Seconds

_SILENCE = Seconds(30.0)
"""How long a host may say nothing before its line is given up."""


def left_behind(past: Sequence[Operation], store: str, here: str) -> tuple[str, str] | None:
    """The host where a guest's line ends and the snapshot it ends with, if that is not here. Pure.

    `past`: the guest's snapshots as the journal has them, the latest first.
    """
    for one in past:
        if one.outcome != Outcome.COMPLETED or one.detail.get("store") != store:
            continue
        id_ = (one.report or {}).get("id")
        if one.source is None or one.source == here or not isinstance(id_, str):
            return None
        return one.source, id_
    return None


async def follow(old: Host, new: Host, guest: str, store: str, snapshot: str) -> str | None:
    """Bring a line from one host to another; None if it came, else why not.

    Without it the next snapshot is as good, and is read whole.
    """
    try:
        moved = await _Carriage(old, new).carried(guest, store, snapshot)
    except TimeoutError:
        return f"{old.name} gave no answer in {_SILENCE:g} s"
    except VmckptError as exc:
        return exc.message
    return None if moved else f"{old.name} does not have it any more"


class _Carriage:
    """Between the two agents."""

    def __init__(self, old: Host, new: Host) -> None:
        self._old, self._new = old, new
        self._pieces: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(2)
        self._kept: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def carried(self, guest: str, store: str, snapshot: str) -> bool:
        """Raises VmckptError, TimeoutError."""

        def order(host: Host, *, gives: bool) -> dict[str, Any]:
            return LineOrder(
                gives=gives, guest=guest, store=store, state=host.agent_state, snapshot=snapshot
            ).as_json()

        giving = asyncio.create_task(
            _carried_out(self._old, order(self._old, gives=True), self._given)
        )
        taking = asyncio.create_task(
            _carried_out(self._new, order(self._new, gives=False), self._taken)
        )
        taking.add_done_callback(self._came)
        both = (giving, taking)
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
            for one in done:
                one.result()
            return bool(taking.result()["moved"])
        finally:
            for one in both:
                one.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _given(self, asked: str, about: Mapping[str, Any]) -> dict[str, Any]:
        if asked == "piece":
            await self._pieces.put(dict(about))
            return {"answer": True}
        await self._pieces.put(None)
        return {"answer": await self._kept}

    async def _taken(self, asked: str, _: Mapping[str, Any]) -> dict[str, Any]:
        del asked
        async with asyncio.timeout(_SILENCE):
            return {"answer": await self._pieces.get()}

    def _came(self, taking: "asyncio.Task[dict[str, Any]]") -> None:
        if not self._kept.done():
            fine = not taking.cancelled() and taking.exception() is None
            self._kept.set_result(fine and bool(taking.result()["moved"]))


async def _carried_out(host: Host, order: dict[str, Any], answer: client.Answer) -> dict[str, Any]:
    return await client.carried_out(host, order, _unheard, asyncio.Event(), answer)


def _unheard(_: Event) -> None:
    pass
