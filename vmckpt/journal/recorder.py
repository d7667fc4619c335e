"""Record an operation in the journal: its events and steps, its lease, and its takeover.

`Recorder.take` only queues an event. A thread writes the event to the journal. If the write fails
(the disk is full, the journal is locked), the recorder warns once and the operation continues.
Steps are different: when `intend` returns, the intent is on disk. Otherwise `intend` raises.
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
from vmckpt.journal.systemd_log import SystemdLog
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
"""Maximum number of samples queued while the journal cannot be written. Beyond this number, the
oldest samples are dropped."""


def begin(
    new: NewOperation,
    warn: Callable[[str], None],
    place: Path | str | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> "Recorder":
    """Record a new operation, and return its recorder.

    If the journal is turned off ("none"), nothing is recorded and the recorder's `id` is None.
    `warn` is called with a one-line message, possibly from another thread: if the journal is turned
    off, once when recording first fails, and once if another controller takes over. Raises
    JournalError if the operation cannot be recorded.
    """
    meant = locations.default() if place is None else place
    if meant == locations.NONE:
        warn(
            "the journal is turned off: nothing is recorded, and other controllers are not"
            " locked out"
        )
        return Recorder(None, None, warn, clock=clock)
    journal = _open(meant)
    try:
        beaten = boottime()
        id_ = journal.begin(new)
    except BaseException:
        journal.close()
        raise
    log = SystemdLog(id_, new)
    log.began(controller_identity.asked_by())
    return Recorder(journal, id_, warn, clock=clock, beaten=beaten, log=log)


def resumed(
    operation: Operation,
    fence: Fence | None,
    warn: Callable[[str], None],
    place: Path | str | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> "Recorder":
    """Return the recorder for an operation that this process has taken over (`Journal.take_over`).

    Raises LeaseLost if another controller has taken the operation over since, and JournalError.
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
    log = SystemdLog(operation.id, operation)
    log.taken_over()
    return Recorder(
        journal, operation.id, warn, clock=clock, beaten=beaten, began=began, fence=fence, log=log
    )


def _open(place: Path | str) -> "Journal":
    # Imported here, as loading the database library takes time.
    from vmckpt.journal.store import Journal  # noqa: PLC0415

    return Journal(place, busy=_BUSY)


class Recorder:
    """Records one operation from beginning to end. Created by `begin` or `resumed`.

    `take`, `update`, `forecast`, `answer`, `take_requests` and `finish` return immediately and do
    not raise. `acquire`, `intend` and `conclude` wait for the journal and may raise, so call them
    in a thread. All methods can be called from several threads. `clock` must be the clock that
    provides the events' times.

    Once another controller has taken the operation over, the recorder writes nothing more, and
    `check` raises LeaseLost.
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
        log: SystemdLog | None = None,
    ) -> None:
        self.id = id_
        """The job's ID; None: the journal is turned off."""
        self.fence = fence
        """The lease on the guest, once acquired."""
        self._journal = journal
        self._log = log
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
        """Record an event. Samples are written twice a second, other events immediately."""
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
        """Record changed fields of the operation."""
        self._put(Batch(changes=changes))

    def forecast(self, values: Mapping[str, Any]) -> None:
        """Record a forecast, as JSON types."""
        self._put(Batch(forecasts=[StoredForecast(made_at=time.time(), values=dict(values))]))

    def take_requests(self) -> list[Request]:
        """Return requests from other terminals since the last call. Each must be answered."""
        taken = []
        while self._requests:
            taken.append(self._requests.popleft())
        return taken

    def answer(self, request: Request, *, ok: bool, text: str) -> None:
        """Record the answer to a request. `ok`: whether the request was carried out."""
        self._put(Batch(answers=[(request.id, ok, text)]))

    def finish(self, outcome: str, report: Mapping[str, Any] | None) -> None:
        """Record that the operation has ended. Answers open requests as not carried out."""
        self._put(Batch(ending=(str(outcome), report)))

    def entrust(self, to: str) -> None:
        """Delegate the operation to agents when this recorder is closed. `to`: the agents' host."""
        self._entrusted = to

    def check(self) -> None:
        """Raise LeaseLost if this process has detected that another controller has taken over."""
        if self._lost is not None:
            raise self._lost

    @property
    def holds(self) -> bool:
        """Whether this process may still change anything.

        False if other machines share the journal and this process's last heartbeat is so old that
        another controller may have taken over.
        """
        if self._lost is not None:
            return False
        if self._journal is None or not self._journal.shared:
            return True
        return controller_lease.holds(self._beaten, boottime())

    def acquire(self, resource: str) -> Fence | None:
        """Acquire a lease, which is released when the operation ends.

        Returns None if the journal is turned off. Raises GuestLocked, LeaseLost, JournalError.
        """
        if self._journal is None or self.id is None:
            return None
        id_, journal = self.id, self._journal
        self.fence = self._seen(lambda: journal.acquire(id_, resource, by=self._me))
        return self.fence

    def intend(self, name: str, intent: Mapping[str, Any]) -> int:
        """Record a step before the step is taken. Returns the step's number.

        Take the step only after this method has returned. Raises LeaseLost, JournalError.
        """
        if self._journal is None or self.id is None:
            return next(self._unrecorded)
        id_, journal = self.id, self._journal
        return self._seen(lambda: journal.intend(id_, name, intent, self.fence, by=self._me))

    def conclude(self, seq: int, state: StepState, result: Mapping[str, Any] | None = None) -> None:
        """Record the result of a step. Raises LeaseLost, JournalError."""
        if self._journal is None or self.id is None:
            return
        id_, journal = self.id, self._journal
        self._seen(lambda: journal.conclude(id_, seq, state, result, self.fence, by=self._me))

    def close(self, limit: Seconds = Seconds(8.0)) -> None:
        """Write all queued records, give up control of an operation that has not ended, and stop.

        `limit`: maximum wait in seconds. Records that are still queued then may be lost.
        """
        if self._journal is None:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(limit)
        if self._thread.is_alive():
            self._complain("the journal may be incomplete: it did not accept the last records")

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
        if not self._done:  # so that recovery need not wait until this process exits
            self._guarded(lambda: self._leave(journal, id_))
        journal.close()

    def _leave(self, journal: "Journal", id_: str) -> None:
        if self._entrusted is None:
            journal.leave(id_, by=self._me)
        else:
            journal.entrust(id_, self._entrusted, by=self._me)

    @property
    def _done(self) -> bool:
        """Whether heartbeats have stopped: the operation has ended here or was taken over."""
        return self._ended or self._lost is not None

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except LeaseLost as exc:
            self._lose(exc)
        # Whatever error occurs here, the operation continues.
        except Exception as exc:  # noqa: BLE001
            self._complain(f"the journal may be incomplete: {exc}")

    def _seen(self, act: Callable[[], T]) -> T:
        """Call `act` and return its result.

        If the call shows that another controller has taken over, remember that.
        """
        self.check()
        try:
            return act()
        except LeaseLost as exc:
            self._lose(exc)
            raise

    def _lose(self, exc: LeaseLost) -> None:
        if self._lost is None:
            self._lost = exc
            self._warned = False  # warn about this even after another warning
            self._complain(str(exc))

    def _beat(self, journal: "Journal", id_: str) -> None:
        sent = boottime()
        journal.heartbeat(id_, fence=self.fence, by=self._me)
        self._beaten = sent

    def _write(self, journal: "Journal", id_: str) -> None:
        """Write all queued records. If the write fails, the records stay queued."""
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
        if self._log is not None:
            self._log.take(batch)

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
        """Warn, but only the first time."""
        if self._warned:
            return
        self._warned = True
        self._warn(why)


_FAILED = StepState.FAILED


class JournalStepLog:
    """The journal as the migration engine uses it: steps, and requests from other terminals."""

    def __init__(self, recorder: Recorder, left: Mapping[int, str] | None = None) -> None:
        """`left`: names, by number, of open steps that an earlier controller left."""
        self._recorder = recorder
        self._open = dict(left or {})

    def check(self) -> None:
        """Check that changes are allowed. Call this immediately before each change.

        Raises LeaseLost if another controller has taken over, HypervisorError if that is unknown.
        """
        self._recorder.check()
        if not self._recorder.holds:
            raise HypervisorError(
                "the journal has not answered recently, and another controller may have taken over;"
                " nothing more was changed",
                host="",
            )

    async def intend(self, step: str, intent: Mapping[str, Any]) -> None:
        """Record a step before the step is taken. Raises JournalError, LeaseLost."""
        seq = await asyncio.to_thread(self._recorder.intend, step, intent)
        self._open[seq] = step

    async def refused(self, step: str) -> None:
        """Record that a step failed. See operator_requests.StepLog."""
        await self._conclude(max(seq for seq, name in self._open.items() if name == step), _FAILED)

    async def _conclude(self, seq: int, state: StepState) -> None:
        """Record the result of a step. If the journal cannot be written, the step stays open."""
        with suppress(JournalError):
            await asyncio.to_thread(self._recorder.conclude, seq, state, {})
            del self._open[seq]

    async def note(self, step: str, result: Mapping[str, Any]) -> None:
        """Record an interim result of a step that may still be undone.

        Raises JournalError, LeaseLost.
        """
        for seq in [seq for seq, name in self._open.items() if name == step]:
            await asyncio.to_thread(self._recorder.conclude, seq, StepState.INTENDED, result)

    async def settle(self, state: StepState) -> None:
        """Record this state for all open steps. When an operation ends, the journal does this."""
        for seq in tuple(self._open):
            await self._conclude(seq, state)

    @property
    def busy(self) -> bool:
        """Whether a recorded step has no recorded result yet."""
        return bool(self._open)

    def take_requests(self) -> list[Request]:
        """Return new requests. Raises LeaseLost if another controller has taken over."""
        self._recorder.check()
        return self._recorder.take_requests()

    def answer(self, request: Request, *, ok: bool, text: str) -> None:
        """Record the answer to a request. See operator_requests.StepLog."""
        self._recorder.answer(request, ok=ok, text=text)


@asynccontextmanager
async def recorded(
    new: NewOperation, guest: str, warn: Callable[[str], None]
) -> AsyncIterator[Recorder]:
    """Record an operation, and hold the lease on a guest (a UUID) during the block.

    If the block raises a VmckptError, the operation is recorded as failed or cancelled, unless
    recovery must examine the operation. The block itself must record success, by calling `finish`.
    Raises GuestLocked, JournalError, LeaseLost.
    """
    recorder = await asyncio.to_thread(begin, new, warn)
    try:
        await asyncio.to_thread(recorder.acquire, guest_resource(guest))
        yield recorder
    except VmckptError as exc:
        # If the agent exited without an answer or could not undo everything, recovery must examine
        # the operation.
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
    """A job to recover, and what recovery may do to the job."""

    inventory: Inventory
    operation: Operation
    steps: Sequence[StoredStep]
    recorder: Recorder | None
    """The recorder of the job; None: a dry run, which only reports what recovery would do."""
    caller: Caller
    adopt: bool
    """Whether to follow work that is still running until the work is finished."""

    def step(self, name: str) -> StoredStep | None:
        """Return the first step with this name; None if the job did not reach such a step."""
        return next((one for one in self.steps if one.name == name), None)

    @property
    def dry(self) -> bool:
        """Whether this is a dry run, which must not change anything."""
        return self.recorder is None

    @property
    def host(self) -> Host:
        """The job's source host. Raises InventoryError."""
        return self.inventory.host(self.operation.source or "")

    def ended(self, told: Settled, **more: Any) -> Settled:
        """Record the job's end, if the job has ended and this is not a dry run. Returns `told`.

        `more`: additional entries for the job's report.
        """
        if self.recorder is not None and told.outcome is not None and not told.goes_on:
            self.recorder.finish(told.outcome, {**more, "recovered": told.as_json()})
        return told


@contextmanager
def taken_over(
    journal: "Journal", operation: Operation, warn: Callable[[str], None]
) -> Iterator[Recorder]:
    """Make this process the operation's controller during the block.

    Raises GuestLocked if another controller is running the operation, LeaseLost, JournalError.
    """
    fence = journal.take_over(operation)
    with resumed(operation, fence, warn, place=journal.place) as kept:
        if operation.controller.entrusted:  # the agents continue the operation if the block fails
            kept.entrust(operation.controller.host)
        yield kept
