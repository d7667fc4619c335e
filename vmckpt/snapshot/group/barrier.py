"""The barrier at which the agents of a group wait for each other while capturing their guests."""

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

_NO_SNAPSHOT = "all guests keep running, and no group snapshot was made"


class Cutting:
    """The barrier of a group snapshot. Use it as `async with Cutting(...) as cutting`.

    Inside the block, the snapshot fails if a member is late.
    """

    def __init__(
        self,
        id_: str,
        members: frozenset[str],
        stop: asyncio.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a barrier for `members`; `stop` is the operator's request to cancel."""
        self.id = id_
        self.size = len(members)
        self.stop = asyncio.Event()
        """Set when the agents have to give up, for any reason."""
        self.failure: VmckptError | None = None
        """The first error; None: no error has occurred."""
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
        """Whether all members have reached the last phase, after which they publish snapshots."""
        return self._meeting.phase is None

    async def reached(self, member: str, phase: Phase) -> None:
        """Report that a member has reached a phase, and wait until all members have.

        Raises CaptureFailed if the group snapshot fails meanwhile.
        """
        async with self._moved:
            self._check()
            try:
                self._meeting = rules.arrived(self._meeting, member, phase, self._clock())
            except ValueError as exc:
                raise CaptureFailed(f"unexpected phase in the group: {exc}") from exc
            self._moved.notify_all()
            await self._moved.wait_for(
                lambda: self.failure is not None or self._meeting.phase is not phase
            )
            # A member past this phase continues; it learns of a later failure at the next phase.
            if self._meeting.phase is phase:
                self._check()

    async def fail(self, error: VmckptError) -> None:
        """Make the snapshot fail: all members stop waiting. The first error is kept."""
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
        await self.fail(Cancelled("the group snapshot was stopped"))

    async def _watch(self) -> None:
        while not self.ended:
            now = self._clock()
            late = rules.late(self._meeting, now)
            if late:
                limit = rules.LIMITS[self._meeting.phase or Phase.STORED]
                await self.fail(
                    CaptureFailed(
                        f"not {self._meeting.phase} within {limit:g} s: {' and '.join(late)};"
                        f" {_NO_SNAPSHOT}",
                        hint="check that the guest's host answers, and try again",
                    )
                )
                return
            await self._turn(rules.time_left(self._meeting, now))

    async def _turn(self, limit: Seconds | None) -> None:
        """Wait until a member reaches the phase, at most `limit` seconds."""
        async with self._moved:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), limit)
