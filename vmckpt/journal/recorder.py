"""Writing down what an operation tells, without ever being in its way.

`Recorder.take` only puts an event aside; a thread of its own writes. Whatever goes wrong there (the
disk is full, the journal locked) makes one warning, and the operation goes on.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from vmckpt.errors import JournalError
from vmckpt.journal.forms import as_record
from vmckpt.journal.records import (
    Batch,
    Changes,
    NewOperation,
    Record,
    Request,
    StoredForecast,
)
from vmckpt.model.events import Event, PhaseChanged, Sampled
from vmckpt.units import Seconds

if TYPE_CHECKING:
    from vmckpt.journal.store import Journal

INTERVAL = Seconds(0.5)
_BUSY = Seconds(2.0)
_MOST_SAMPLES = 20_000
"""That many wait for a journal that cannot be written; then the oldest are dropped."""


def begin(
    new: NewOperation,
    warn: Callable[[str], None],
    *,
    path: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> "Recorder":
    """Write down that an operation begins, and go on recording it.

    Without a journal it records nothing, and `id` is None. `warn` gets one line at the most, from
    another thread.
    """
    # Only who keeps a journal pays for loading the database library.
    from vmckpt.journal.store import Journal  # noqa: PLC0415

    try:
        journal = Journal(path, busy=_BUSY)
    except JournalError as exc:
        warn(f"nothing is recorded: {exc}")
        return Recorder(None, None, warn, clock=clock)
    try:
        id_ = journal.begin(new)
    except JournalError as exc:
        journal.close()
        warn(f"nothing is recorded: {exc}")
        return Recorder(None, None, warn, clock=clock)
    return Recorder(journal, id_, warn, clock=clock)


class Recorder:
    """Records one operation from its beginning to its end; made by `begin`.

    `take`, `update`, `forecast`, `answer`, `take_requests` and `finish` return at once and raise
    nothing. `clock` is the one that the events' times come from.
    """

    def __init__(
        self,
        journal: "Journal | None",
        id_: str | None,
        warn: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id = id_
        """None: there is no journal."""
        self._journal = journal
        self._warn = warn
        self._warned = False
        self._clock = clock
        self._began = Seconds(clock())
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

    def close(self, limit: Seconds = Seconds(8.0)) -> None:
        """Write what is left and stop; after `limit` it is given up."""
        if self._journal is None:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(limit)
        if self._thread.is_alive():
            self._complain("the journal does not take what is left to write")

    def _put(self, batch: Batch) -> None:
        if self._journal is None:
            return
        with self._lock:
            self._waiting = self._waiting.then(batch)
        self._wake.set()

    def _work(self) -> None:
        if (journal := self._journal) is None or self.id is None:
            return
        pruned = False
        while not self._closing:
            self._wake.wait(INTERVAL)
            self._wake.clear()
            self._guarded(lambda: self._write(journal))
            self._guarded(lambda: self._requests.extend(journal.take_requests(self.id or "")))
            if not pruned:
                pruned = True
                self._guarded(journal.prune)
        self._guarded(lambda: self._write(journal))
        journal.close()

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        # Whatever is wrong in here, the operation goes on.
        except Exception as exc:  # noqa: BLE001
            self._complain(str(exc))

    def _write(self, journal: "Journal") -> None:
        """Write all that waits; what cannot be written now waits on."""
        batch = self._collect()
        if not batch or self.id is None:
            return
        try:
            journal.write(self.id, batch)
        except JournalError:
            del batch.samples[:-_MOST_SAMPLES]
            with self._lock:
                self._waiting = batch.then(self._waiting)
            raise

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
        self._warn(f"what happens may not be recorded: {why}")
