"""An operation's steps, as its engine writes them down."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from vmckpt.errors import HypervisorError, JournalError
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import Request, StepState

_FAILED = StepState.FAILED


class JournalDesk:
    """The journal as an engine uses it: steps, and what other terminals ask for."""

    def __init__(self, recorder: Recorder, left: Mapping[int, str] | None = None) -> None:
        """`left`: steps of an earlier controller that are open, by number."""
        self._recorder = recorder
        self._open = dict(left or {})

    def check(self) -> None:
        """Right before something is changed. Raises LeaseLost if another controller has taken over,
        and HypervisorError while that cannot be known."""
        self._recorder.check()
        if not self._recorder.holds:
            raise HypervisorError(
                "nothing is changed: the journal has not answered for too long, and another"
                " controller may have taken over",
                host="",
            )

    async def intend(self, step: str, intent: Mapping[str, Any]) -> None:
        """Write down what is about to be done. Raises JournalError, LeaseLost."""
        seq = await asyncio.to_thread(self._recorder.intend, step, intent)
        self._open[seq] = step

    async def refused(self, step: str) -> None:
        """See wishes.Desk."""
        await self._conclude(max(seq for seq, name in self._open.items() if name == step), _FAILED)

    async def _conclude(self, seq: int, state: StepState) -> None:
        """A journal that cannot be written leaves it to recovery."""
        with suppress(JournalError):
            await asyncio.to_thread(self._recorder.conclude, seq, state, {})
            del self._open[seq]

    async def note(self, step: str, result: Mapping[str, Any]) -> None:
        """Keep what came of a step that may still be undone. Raises JournalError, LeaseLost."""
        for seq in [seq for seq, name in self._open.items() if name == step]:
            await asyncio.to_thread(self._recorder.conclude, seq, StepState.INTENDED, result)

    async def settle(self, state: StepState) -> None:
        """All that is open has become that; at an operation's end its journal sees to it."""
        for seq in tuple(self._open):
            await self._conclude(seq, state)

    @property
    def busy(self) -> bool:
        """Whether something was intended, and not said yet what became of it."""
        return bool(self._open)

    def take_requests(self) -> list[Request]:
        """See wishes.Desk. Raises LeaseLost if another controller has taken over."""
        self._recorder.check()
        return self._recorder.take_requests()

    def answer(self, request: Request, *, ok: bool, text: str) -> None:
        """See wishes.Desk."""
        self._recorder.answer(request, ok=ok, text=text)
