"""A migration that goes as a script says, on the loop's clock."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from vmckpt.errors import HypervisorError
from vmckpt.model.guests import GuestState, Presence
from vmckpt.model.jobs import JobSample, JobTotals
from vmckpt.model.ports import MoveOrder
from vmckpt.units import Bytes, Seconds

RUNS = Presence(reachable=True, state=GuestState.RUNNING)
GONE = Presence(reachable=True)
USUAL_LIMIT = Seconds(0.3)
TOTALS = JobTotals(
    total=Seconds(3.0), setup=Seconds(0.0), downtime=Seconds(0.08), iterations=3,
    transferred=Bytes(1000),
)  # fmt: skip


@dataclass
class FakeMover:
    """Ends after `lasts` seconds, by itself or `abort_takes` after an abort that it accepts."""

    lasts: float = 3.0
    errors: list[HypervisorError] = field(default_factory=list)
    """Raised at the ends of the first moves, in this order."""
    samples: Sequence[JobSample] = ()
    statistics: JobTotals | None = TOTALS
    aborts_ignored: int = 0
    abort_takes: float = 0.3
    presences: list[tuple[Presence, Presence]] = field(default_factory=list)
    """Answers in this order, the last one for ever; empty: what the move led to."""

    autostart_error: HypervisorError | None = None

    calls: list[str] = field(default_factory=list)
    moved: bool = False
    limit: Seconds = USUAL_LIMIT
    taken: int = 0
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    async def move(self, order: MoveOrder) -> None:
        self.calls.append(f"move {order.driver}")
        aborted = asyncio.create_task(self.aborted.wait())
        await asyncio.wait([aborted], timeout=self.lasts)
        aborted.cancel()
        if self.aborted.is_set():
            await asyncio.sleep(self.abort_takes)
            raise HypervisorError("alpha: migration: canceled by client", host="alpha")
        if self.errors:
            raise self.errors.pop(0)
        self.moved = True

    async def sample(self) -> JobSample | None:
        if not self.samples:
            return None
        self.taken += 1
        return self.samples[min(self.taken, len(self.samples)) - 1]

    async def totals(self) -> JobTotals | None:
        return self.statistics

    async def abort(self) -> None:
        self.calls.append("abort")
        if self.aborts_ignored:
            self.aborts_ignored -= 1
        else:
            self.aborted.set()

    async def set_autostart(self) -> None:
        self.calls.append("autostart")
        if self.autostart_error is not None:
            raise self.autostart_error

    async def set_max_downtime(self, limit: Seconds) -> None:
        self.calls.append(f"downtime {limit:g}")
        self.limit = limit

    async def max_downtime(self) -> Seconds:
        return self.limit

    async def presence(self) -> tuple[Presence, Presence]:
        if self.presences:
            return self.presences.pop(0) if len(self.presences) > 1 else self.presences[0]
        return (GONE, RUNS) if self.moved else (RUNS, GONE)
