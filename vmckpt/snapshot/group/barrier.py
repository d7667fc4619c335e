"""The meeting point of a group's agents, while their guests are captured as one cut."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from vmckpt.errors import Cancelled, CaptureFailed, VmckptError
from vmckpt.model.recovery import Phase
from vmckpt.snapshot.group import rules
from vmckpt.snapshot.group.rules import Meeting
from vmckpt.units import Seconds

_NO_SNAPSHOT = "all guests go on, and no snapshot of the group was made"


class Cutting:
    """Use as `async with Cutting(...) as cutting`; in it, who is late is noticed."""

    def __init__(
        self,
        id_: str,
        members: frozenset[str],
        stop: asyncio.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stop`: the operator's."""
        self.id = id_
        self.size = len(members)
        self.stop = asyncio.Event()
        """Set when the agents are to give up, for whatever reason."""
        self.failure: VmckptError | None = None
        """The first thing that went wrong."""
        self._asked, self._clock = stop, clock
        self._meeting = Meeting(members=members, since=clock())
        self._moved = asyncio.Condition()
        self._watching: tuple[asyncio.Task[None], ...] = ()

    async def __aenter__(self) -> Self:
        self._watching = (
            asyncio.create_task(self._watch()),
            asyncio.create_task(self._pass_on()),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._watching:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    @property
    def ended(self) -> bool:
        """All have reached the last phase: from then on they publish."""
        return self._meeting.phase is None

    async def reached(self, member: str, phase: Phase) -> None:
        """A member has come so far; returns when all have. Raises VmckptError if it fails."""
        async with self._moved:
            self._check()
            try:
                self._meeting = rules.arrived(self._meeting, member, phase, self._clock())
            except ValueError as exc:
                raise CaptureFailed(f"a cut that nobody ordered: {exc}") from exc
            self._moved.notify_all()
            await self._moved.wait_for(
                lambda: self.failure is not None or self._meeting.phase is not phase
            )
            # Whoever is through may go on: another's failure comes to it at the next phase.
            if self._meeting.phase is phase:
                self._check()

    async def fail(self, error: VmckptError) -> None:
        """All are let go."""
        async with self._moved:
            if self.failure is None:
                self.failure = error
            self.stop.set()
            self._moved.notify_all()

    def _check(self) -> None:
        if self.failure is not None:
            raise CaptureFailed(f"{self.failure.message}; {_NO_SNAPSHOT}")

    async def _pass_on(self) -> None:
        await self._asked.wait()
        await self.fail(Cancelled("the snapshot of the group was stopped"))

    async def _watch(self) -> None:
        while not self.ended:
            now = self._clock()
            late = rules.late(self._meeting, now)
            if late:
                limit = rules.LIMITS[self._meeting.phase or Phase.STORED]
                await self.fail(
                    CaptureFailed(
                        f"{' and '.join(late)} was not {self._meeting.phase} within {limit:g} s:"
                        f" {_NO_SNAPSHOT}",
                        hint="see that its host answers, and try again",
                    )
                )
                return
            await self._turn(rules.time_left(self._meeting, now))

    async def _turn(self, limit: Seconds | None) -> None:
        """Until somebody arrives, or so long."""
        async with self._moved:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), limit)
