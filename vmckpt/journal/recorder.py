"""Record an operation: its events, steps, an agent's order, the takeover of an orphan.

`Recorder.take` only puts an event aside; a thread of its own writes it. Whatever goes wrong there
(the disk is full, the journal locked) gives one warning, and the operation goes on. Its changes to
the world are another matter: an intent is on disk before `intend` returns, or that raises.
"""

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from vmckpt.errors import (
    Cancelled,
    HypervisorError,
    JournalError,
    LeaseLost,
    RemoteError,
    VmckptError,
)
from vmckpt.inventory import Inventory
from vmckpt.journal import controller_identity
from vmckpt.journal import location as locations
from vmckpt.journal.records import (
    Batch,
    Changes,
    NewOperation,
    Operation,
    Record,
    Request,
    StepState,
    StoredForecast,
    StoredStep,
)
from vmckpt.journal.serialization import as_record
from vmckpt.lease import controller_lease
from vmckpt.lease.clock import boottime
from vmckpt.lease.controller_lease import Fence, guest_resource
from vmckpt.model.events import Caller, Event, PhaseChanged, Sampled
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.units import Seconds

if TYPE_CHECKING:
    from vmckpt.journal.store import Journal


T = TypeVar("T")

INTERVAL = Seconds(0.5)
_BUSY = Seconds(2.0)
_MOST_SAMPLES = 20_000
"""That many wait for a journal that cannot be written; then the oldest are dropped."""


def begin(
    new: NewOperation,
    warn: Callable[[str], None],
    place: Path | str | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> "Recorder":
    """Write down that an operation begins, and go on recording it.

    Raises JournalError if that cannot be written. Where "none" is chosen instead of a journal
    nothing is recorded, and `id` is None. `warn` gets one line at the most, from another thread.
    """
    meant = locations.default() if place is None else place
    if meant == locations.NONE:
        warn("nothing is recorded and no other controller is kept away")
        return Recorder(None, None, warn, clock=clock)
    journal = _open(meant)
    try:
        beaten = boottime()
        id_ = journal.begin(new)
    except BaseException:
        journal.close()
        raise
    return Recorder(journal, id_, warn, clock=clock, beaten=beaten)


def resumed(
    operation: Operation,
    fence: Fence | None,
    warn: Callable[[str], None],
    place: Path | str | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> "Recorder":
    """Go on recording an operation that this process has taken over (`Journal.take_over`).

    Raises LeaseLost if somebody else has taken it over since, and JournalError.
    """
    journal = _open(locations.default() if place is None else place)
    try:
        beaten = boottime()
        journal.heartbeat(operation.id, fence=fence)
        age = journal.now() - operation.began_at
    except BaseException:
        journal.close()
        raise
    began = Seconds(clock() - max(0.0, age))
    return Recorder(
        journal, operation.id, warn, clock=clock, beaten=beaten, began=began, fence=fence
    )


def _open(place: Path | str) -> "Journal":
    # Only who keeps a journal pays for loading the database library.
    from vmckpt.journal.store import Journal  # noqa: PLC0415

    return Journal(place, busy=_BUSY)


class Recorder:
    """Records one operation from its beginning to its end; made by `begin` or `resumed`.

    `take`, `update`, `forecast`, `answer`, `take_requests` and `finish` return at once and raise
    nothing. `acquire`, `intend` and `conclude` wait for the journal and raise: call them from a
    thread. All may be called from several. `clock` is the one that the events' times come from.

    Once another controller has taken the operation over, nothing more is written, and `check`
    raises LeaseLost.
    """

    def __init__(
        self,
        journal: "Journal | None",
        id_: str | None,
        warn: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        beaten: Seconds | None = None,
        began: Seconds | None = None,
        fence: Fence | None = None,
    ) -> None:
        self.id = id_
        """None: there is no journal."""
        self.fence = fence
        """The lease on the guest, once it is acquired."""
        self._journal = journal
        self._warn = warn
        self._warned = False
        self._clock = clock
        self._began = Seconds(clock()) if began is None else began
        self._me = controller_identity.this_process()
        self._beaten = boottime() if beaten is None else beaten
        self._lost: LeaseLost | None = None
        self._ended = False
        self._entrusted: str | None = None
        self._unrecorded = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting = Batch()
        self._told: deque[tuple[Event, Seconds]] = deque()
        self._samples: deque[tuple[Event, Seconds]] = deque(maxlen=_MOST_SAMPLES)
        self._requests: deque[Request] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"journal {id_}", daemon=True)
        if journal is not None:
            self._thread.start()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, event: Event) -> None:
        """Record an event; all but samples are written at once."""
        if self._journal is None:
            return
        told = (event, Seconds(self._clock()))
        if isinstance(event, Sampled):
            self._samples.append(told)
            return
        self._told.append(told)
        if isinstance(event, PhaseChanged):
            self.update(phase=str(event.phase))
        self._wake.set()

    def update(self, **changes: Unpack[Changes]) -> None:
        """What has become known of the operation."""
        self._put(Batch(changes=changes))

    def forecast(self, values: Mapping[str, Any]) -> None:
        """Record what is expected, in JSON's types."""
        self._put(Batch(forecasts=[StoredForecast(made_at=time.time(), values=dict(values))]))

    def take_requests(self) -> list[Request]:
        """What other terminals asked for since the last call; each must be answered."""
        taken = []
        while self._requests:
            taken.append(self._requests.popleft())
        return taken

    def answer(self, request: Request, *, ok: bool, text: str) -> None:
        """Say what became of a request."""
        self._put(Batch(answers=[(request.id, ok, text)]))

    def finish(self, outcome: str, report: Mapping[str, Any] | None) -> None:
        """The operation has ended; open requests are answered so."""
        self._put(Batch(ending=(str(outcome), report)))

    def entrust(self, to: str) -> None:
        """Agents go on with it when this recorder is closed; `to`: on which host."""
        self._entrusted = to

    def check(self) -> None:
        """Raise LeaseLost if it is known that another controller has taken over."""
        if self._lost is not None:
            raise self._lost

    @property
    def holds(self) -> bool:
        """Whether this process may still change something.

        Where other machines share the journal, it may not once its last heartbeat is so old that
        they may take over.
        """
        if self._lost is not None:
            return False
        if self._journal is None or not self._journal.shared:
            return True
        return controller_lease.holds(self._beaten, boottime())

    def acquire(self, resource: str) -> Fence | None:
        """Take a lease, which is given back when the operation ends; None without a journal.

        Raises GuestLocked, LeaseLost, JournalError.
        """
        if self._journal is None or self.id is None:
            return None
        id_, journal = self.id, self._journal
        self.fence = self._seen(lambda: journal.acquire(id_, resource, by=self._me))
        return self.fence

    def intend(self, name: str, intent: Mapping[str, Any]) -> int:
        """Write down what is about to be done; the step's number. Raises LeaseLost, JournalError.

        Only if it returns may the step be taken.
        """
        if self._journal is None or self.id is None:
            return next(self._unrecorded)
        id_, journal = self.id, self._journal
        return self._seen(lambda: journal.intend(id_, name, intent, self.fence, by=self._me))

    def conclude(self, seq: int, state: StepState, result: Mapping[str, Any] | None = None) -> None:
        """Write down what came of a step. Raises LeaseLost, JournalError."""
        if self._journal is None or self.id is None:
            return
        id_, journal = self.id, self._journal
        self._seen(lambda: journal.conclude(id_, seq, state, result, self.fence, by=self._me))

    def close(self, limit: Seconds = Seconds(8.0)) -> None:
        """Write what is left and stop; after `limit` it is given up."""
        if self._journal is None:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(limit)
        if self._thread.is_alive():
            self._complain(
                "what happens may not be recorded: the journal does not take what is left to write"
            )

    def _put(self, batch: Batch) -> None:
        if self._journal is None:
            return
        with self._lock:
            self._waiting = self._waiting.then(batch)
        self._wake.set()

    def _work(self) -> None:
        if (journal := self._journal) is None or (id_ := self.id) is None:
            return
        pruned, tried = False, self._beaten
        while not self._closing:
            self._wake.wait(INTERVAL)
            self._wake.clear()
            if not self._done and boottime() - tried >= controller_lease.HEARTBEAT:
                tried = boottime()
                self._guarded(lambda: self._beat(journal, id_))
            self._guarded(lambda: self._write(journal, id_))
            if not self._done:
                self._guarded(lambda: self._requests.extend(journal.take_requests(id_)))
            if not pruned:
                pruned = True
                self._guarded(journal.prune)
        self._guarded(lambda: self._write(journal, id_))
        if not self._done:  # it has not ended, and recovery need not wait for this process to
            self._guarded(lambda: self._leave(journal, id_))
        journal.close()

    def _leave(self, journal: "Journal", id_: str) -> None:
        if self._entrusted is None:
            journal.leave(id_, by=self._me)
        else:
            journal.entrust(id_, self._entrusted, by=self._me)

    @property
    def _done(self) -> bool:
        """Whether there is nothing left to keep."""
        return self._ended or self._lost is not None

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except LeaseLost as exc:
            self._lose(exc)
        # Whatever is wrong in here, the operation goes on.
        except Exception as exc:  # noqa: BLE001
            self._complain(f"what happens may not be recorded: {exc}")

    def _seen(self, act: Callable[[], T]) -> T:
        """Do something, and remember it if another controller has taken over."""
        self.check()
        try:
            return act()
        except LeaseLost as exc:
            self._lose(exc)
            raise

    def _lose(self, exc: LeaseLost) -> None:
        if self._lost is None:
            self._lost = exc
            self._warned = False  # this is worth a line of its own
            self._complain(str(exc))

    def _beat(self, journal: "Journal", id_: str) -> None:
        sent = boottime()
        journal.heartbeat(id_, fence=self.fence, by=self._me)
        self._beaten = sent

    def _write(self, journal: "Journal", id_: str) -> None:
        """Write all that waits; what cannot be written now waits on."""
        batch = self._collect()
        if not batch or self._lost is not None:
            return
        try:
            journal.write(id_, batch, self.fence, by=self._me)
        except JournalError:
            del batch.samples[:-_MOST_SAMPLES]
            with self._lock:
                self._waiting = batch.then(self._waiting)
            raise
        self._ended = self._ended or batch.ending is not None

    def _collect(self) -> Batch:
        with self._lock:
            batch, self._waiting = self._waiting, Batch()
        while self._told:
            batch.events.append(self._record(self._told.popleft()))
        while self._samples:
            batch.samples.append(self._record(self._samples.popleft()))
        return batch

    def _record(self, told: tuple[Event, Seconds]) -> Record:
        event, now = told
        return as_record(event, self._began, now)

    def _complain(self, why: str) -> None:
        """Warn, once."""
        if self._warned:
            return
        self._warned = True
        self._warn(why)


_FAILED = StepState.FAILED


class JournalStepLog:
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
        """See operator_requests.StepLog."""
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
        """See operator_requests.StepLog. Raises LeaseLost if another controller has taken over."""
        self._recorder.check()
        return self._recorder.take_requests()

    def answer(self, request: Request, *, ok: bool, text: str) -> None:
        """See operator_requests.StepLog."""
        self._recorder.answer(request, ok=ok, text=text)


@asynccontextmanager
async def recorded(
    new: NewOperation, guest: str, warn: Callable[[str], None]
) -> AsyncIterator[Recorder]:
    """Write down that it begins and hold the lease on a guest (a UUID); what goes wrong is its end.

    Who uses it writes the good end down. Raises GuestLocked, JournalError, LeaseLost.
    """
    recorder = await asyncio.to_thread(begin, new, warn)
    try:
        await asyncio.to_thread(recorder.acquire, guest_resource(guest))
        yield recorder
    except VmckptError as exc:
        # An agent that ended without a word, or could not undo all: recovery looks.
        if exc.undone and not isinstance(exc, RemoteError):
            if isinstance(exc, Cancelled):
                recorder.finish(Outcome.CANCELLED, None)
            else:
                recorder.finish(Outcome.FAILED, {"error": str(exc)})
        raise
    finally:
        await asyncio.to_thread(recorder.close)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanedJob:
    """It, and how far it is to be put in order."""

    inventory: Inventory
    operation: Operation
    steps: Sequence[StoredStep]
    recorder: Recorder | None
    """None: only say what would be done."""
    caller: Caller
    adopt: bool
    """What still runs is watched to its end."""

    def step(self, name: str) -> StoredStep | None:
        """The first step of that name; None: it had not come to that."""
        return next((one for one in self.steps if one.name == name), None)

    @property
    def dry(self) -> bool:
        """Nothing may be touched."""
        return self.recorder is None

    @property
    def host(self) -> Host:
        """Where it was at work. Raises InventoryError."""
        return self.inventory.host(self.operation.source or "")

    def ended(self, told: Settled, **more: Any) -> Settled:
        """Write down that it has ended so, if it has, and this is not only a look; `more`: what
        else its report says."""
        if self.recorder is not None and told.outcome is not None and not told.goes_on:
            self.recorder.finish(told.outcome, {**more, "recovered": told.as_json()})
        return told


@contextmanager
def taken_over(
    journal: "Journal", operation: Operation, warn: Callable[[str], None]
) -> Iterator[Recorder]:
    """This process is the operation's controller from now on.

    Raises GuestLocked if somebody else is at it.
    """
    fence = journal.take_over(operation)
    with resumed(operation, fence, warn, place=journal.place) as kept:
        if operation.controller.entrusted:  # its agents go on with it, whatever fails here
            kept.entrust(operation.controller.host)
        yield kept
