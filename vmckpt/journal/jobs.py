"""The journal for front ends: list jobs, follow a job, and send requests to a job's controller."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmckpt.errors import BadInput, GuestLocked, JournalError, OrphanedJobs, OutcomeUnknown
from vmckpt.inventory import looks_only
from vmckpt.journal import controller_identity, location
from vmckpt.journal.migration_history import PastMove
from vmckpt.journal.records import (
    MAINTENANCE,
    MIGRATE,
    WHOLE_HOST,
    Operation,
    Request,
    RequestKind,
    State,
    StoredEvent,
    StoredForecast,
    StoredSample,
    StoredStep,
)
from vmckpt.lease import controller_lease
from vmckpt.lease.controller_lease import guest_resource
from vmckpt.units import Seconds

if TYPE_CHECKING:
    from vmckpt.journal.store import Journal

PATIENCE = Seconds(10.0)
_POLL = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a request."""

    ok: bool
    text: str


Direct = Callable[[Operation, RequestKind, Mapping[str, Any]], Answer]
"""Carries out a request on a guest in place of the job's dead controller. Raises VmckptError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job in a list."""

    operation: Operation
    attended: bool | None
    """Whether the controller is alive: its process is running on this machine, or its last
    heartbeat is recent. None: unknown. Meaningless for a job that has ended."""
    sample: StoredSample | None
    """The last sample of the job, if the job is active."""

    @property
    def unattended(self) -> bool:
        return self.operation.active and self.attended is False

    @property
    def doing(self) -> str:
        """The state to display: an ended job's outcome, "unattended", "waiting", or the phase."""
        operation = self.operation
        if not operation.active:
            return operation.outcome or operation.state
        if self.unattended:
            return "unattended"
        if operation.state == State.WAITING:
            return str(operation.state)
        return operation.phase or operation.state

    def as_json(self) -> dict[str, Any]:
        told = self.operation.as_json()
        told["controller"]["alive"] = self.attended if self.operation.active else None
        told["orphaned"] = told["unattended"] = self.unattended
        told["done"] = self.sample.done if self.sample else None
        return told


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetail:
    """All records of one job."""

    view: JobView
    forecast: StoredForecast | None
    events: Sequence[StoredEvent]
    samples: Sequence[StoredSample]
    requests: Sequence[Request]
    steps: Sequence[StoredStep] = ()
    """The steps that the job has taken or intended."""

    def as_json(self) -> dict[str, Any]:
        report = self.view.operation.report
        return {
            **self.view.as_json(),
            "report": None if report is None else dict(report),
            "forecast": self.forecast.as_json() if self.forecast else None,
            "events": [event.as_json() for event in self.events],
            "samples": [sample.as_json() for sample in self.samples],
            "requests": [request.as_json() for request in self.requests],
            "steps": [step.as_json() for step in self.steps],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """The records of a job that are new since the last query."""

    view: JobView
    events: Sequence[StoredEvent]
    samples: Sequence[StoredSample]
    requests: Sequence[Request] = ()
    """All requests, because earlier requests may have been answered since."""
    parts: Sequence[JobView] = ()
    """For a job on a whole host: its migrations."""
    steps: Sequence[StoredStep] = ()
    """For a job on a whole host: its steps."""


def load() -> None:
    """Import the database library, which takes 0.2 s. Call this in a thread while hosts answer."""
    place = location.default()
    if place != location.NONE:
        import_module("vmckpt.journal.store")
    if isinstance(place, Path):
        import_module("vmckpt.journal.sqlite")


def open_journal(*, read_only: bool = False) -> "Journal":
    """Open the default journal; with `read_only` or in read-only mode, for reading only.

    Raises JournalError.
    """
    # Imported here, as loading the database library takes time.
    from vmckpt.journal.store import Journal  # noqa: PLC0415

    return Journal(read_only=read_only or looks_only())


def jobs(
    journal: "Journal", *, everything: bool = False, limit: int = 50, guest: str | None = None
) -> list[JobView]:
    """Return active jobs, the latest first. With `everything`, include the last `limit` ended jobs.

    `guest`: return only jobs of the guest with this name or UUID. Raises JournalError.
    """
    found = journal.operations(active=True, guest=guest)
    if everything:
        found += journal.operations(active=False, limit=limit, guest=guest)
        found.sort(key=lambda one: one.began_at, reverse=True)
    return _views(journal, found)


def job(journal: "Journal", name: str) -> JobDetail:
    """Return a job by its ID, a prefix of its ID, or its guest.

    Raises BadInput, with similar names, if there is no such job, and JournalError.
    """
    operation = journal.operation(name, ended=True)
    return JobDetail(
        view=_view(journal, operation),
        forecast=journal.forecast(operation.id),
        events=journal.events(operation.id),
        samples=journal.samples(operation.id),
        requests=journal.requests(operation.id),
        steps=journal.steps(operation.id),
    )


def past_snapshots(guest_uuid: str) -> Sequence[Operation]:
    """Return a guest's ended snapshot jobs, the latest first; empty if no journal can be read."""
    try:
        with open_journal() as journal:
            return journal.snapshots(guest_uuid)
    except JournalError:
        return ()


def past_moves(source: str, target: str) -> Sequence[PastMove]:
    """Return ended migrations from `source` to `target`, the latest first.

    Returns an empty sequence if no journal can be read.
    """
    try:
        with open_journal() as journal:
            return journal.recent_moves(source, target)
    except JournalError:
        return ()


def _view(journal: "Journal", operation: Operation) -> JobView:
    return _views(journal, [operation])[0]


def _views(journal: "Journal", found: Sequence[Operation]) -> list[JobView]:
    """Return views of operations, with controller state and last sample if they are active."""
    samples = journal.last_samples([one.id for one in found if one.active])
    return [
        JobView(
            operation=one,
            attended=attended(journal, one) if one.active else None,
            sample=samples.get(one.id),
        )
        for one in found
    ]


def attended(journal: "Journal", operation: Operation) -> bool | None:
    """Return whether an active operation's controller is alive; None if unknown."""
    if operation.controller.entrusted:
        return True  # agents on the hosts run this operation
    alive = controller_identity.is_alive(operation.controller)
    if alive is not None or operation.alive_until is None:
        return alive
    return controller_lease.attended(None, operation.alive_until, journal.now())


def interrupted(guest_uuid: str) -> str | None:
    """Return the ID of a guest's job that has lost its controller.

    Returns None if there is no such job. Raises JournalError.
    """
    if location.default() == location.NONE:
        return None
    with open_journal() as journal:
        found = (one.id for one in journal.abandoned() if one.guest_uuid == guest_uuid)
        return next(found, None)


def require_not_delegated(guest: str) -> None:
    """Raise GuestLocked if a guest (a name or UUID) is delegated to agents on hosts.

    A protected guest is paused many times a second, so observations of its state are meaningless.
    Raises JournalError.
    """
    if location.default() == location.NONE:
        return
    with open_journal() as journal:
        for one in journal.delegated_to_agents():
            if one.kind != MAINTENANCE and guest in (one.guest, one.guest_uuid):
                raise GuestLocked(
                    f"guest {one.guest} is protected by job {one.id}, run by agents on"
                    f" {one.controller.host}; nothing was changed",
                    hint=f"run vmckpt unprotect {one.guest} first",
                )


def require_unlocked(guest_uuid: str) -> None:
    """Raise GuestLocked if a job holds the lease on a guest. Raises JournalError."""
    if location.default() == location.NONE:
        return
    with open_journal() as journal:
        held = journal.holder(guest_resource(guest_uuid))
    if held is not None:
        raise GuestLocked(
            f"the guest is locked by {held.kind} job {held.id}",
            hint=f"run vmckpt watch {held.id} to follow the job",
        )


class Follower:
    """Follows one job. Each call of `look` returns the records that are new since the last call."""

    def __init__(self, journal: "Journal", name: str) -> None:
        self.id = journal.operation(name).id
        self._journal = journal
        self._event = self._sample = 0

    def look(self) -> News:
        """Return the job's new records. Raises BadInput if the job was deleted, JournalError."""
        found = news(self._journal, self.id, self._event, self._sample)
        self._event = found.events[-1].seq if found.events else self._event
        self._sample = found.samples[-1].seq if found.samples else self._sample
        return found


def news(journal: "Journal", id_: str, event: int, sample: int) -> News:
    """Return a job's records that follow the event and the sample with the given numbers.

    Raises BadInput if there is no such job, and JournalError.
    """
    # The operation is read first. If the operation has ended, the records read later are complete.
    view = _view(journal, journal.operation(id_, ended=True))
    whole = view.operation.kind in WHOLE_HOST
    return News(
        view=view, events=journal.events(id_, event), samples=journal.samples(id_, sample),
        requests=journal.requests(id_), parts=parts(journal, id_) if whole else (),
        steps=journal.steps(id_) if whole else (),
    )  # fmt: skip


def parts(journal: "Journal", id_: str) -> list[JobView]:
    """Return the migrations that belong to a job on a whole host, sorted by start time."""
    began = journal.operation(id_, ended=True).began_at
    return _views(journal, journal.parts(id_, began))


def control(
    journal: "Journal",
    job: str,
    kind: RequestKind,
    arguments: Mapping[str, Any],
    direct: Direct | None = None,
    *,
    patience: Seconds = PATIENCE,
) -> Answer:
    """Send a request to a running job, and wait up to `patience` seconds for the answer.

    `direct`: the function that carries out the request if the controller of a migration is dead.
    Raises BadInput if there is no such job, or the job has ended or has no controller. Raises
    OrphanedJobs if no controller took the request, so nothing was done. Raises OutcomeUnknown if a
    controller took the request but did not answer. Raises JournalError.
    """
    operation = journal.operation(job)
    if not operation.active:
        raise BadInput(
            f"job {operation.id} has ended: {operation.outcome}",
            hint=f"run vmckpt job {operation.id} for details",
        )
    refuse_uncontrolled(operation)
    if attended(journal, operation) is False:
        return _without_it(operation, kind, arguments, direct)
    request = journal.ask(operation.id, kind, arguments, controller_identity.asked_by())
    answered = _wait(journal, operation, request, patience)
    if answered is not None:
        return answered
    if journal.withdraw(request):
        if attended(journal, journal.operation(operation.id)) is False:
            return _without_it(operation, kind, arguments, direct)
        raise OrphanedJobs(
            f"the controller of {operation.id} did not respond within {patience:.0f} s; the request"
            " was withdrawn and nothing was done",
            hint="try again",
        )
    late = journal.request(request)
    if late.ok is not None:
        return Answer(ok=late.ok, text=late.answer or "")
    raise OutcomeUnknown(
        f"{operation.id} accepted the request but did not answer within {patience:.0f} s; the"
        " request may or may not have been carried out",
        host=operation.source or operation.controller.host,
        hint=f"run vmckpt job {operation.id}",
    )


def _without_it(
    operation: Operation, kind: RequestKind, arguments: Mapping[str, Any], direct: Direct | None
) -> Answer:
    """Carry out a request to a job whose controller is dead, and return the answer.

    Raises OrphanedJobs if that is not possible.
    """
    if direct is not None and operation.kind == MIGRATE:
        return direct(operation, kind, arguments)
    raise unattended(operation, kind, arguments)


def refuse_uncontrolled(operation: Operation) -> None:
    """Raise BadInput for a job that by design has no controller."""
    if operation.kind == MAINTENANCE:
        raise BadInput(
            f"{operation.id} only records that {operation.source} is in maintenance",
            hint=f"run vmckpt maintenance leave {operation.source} to end the maintenance",
        )
    if operation.controller.entrusted:
        raise BadInput(
            f"{operation.id} (kind: {operation.kind}) is run by vmckpt's agents on its hosts",
            hint=f"run vmckpt unprotect {operation.guest} to end the job",
        )


def _wait(
    journal: "Journal", operation: Operation, request: int, patience: Seconds
) -> Answer | None:
    """Wait for the answer to the request with number `request`.

    Returns None if no answer arrives within `patience`, or the controller has died.
    """
    until = time.monotonic() + patience
    while time.monotonic() < until:
        found = journal.request(request)
        if found.ok is not None:
            return Answer(ok=found.ok, text=found.answer or "")
        if attended(journal, journal.operation(operation.id)) is False:
            return None
        time.sleep(_POLL)
    return None


def unattended(
    operation: Operation, kind: RequestKind, arguments: Mapping[str, Any]
) -> OrphanedJobs:
    """Build the error for a request to an orphaned job. The hint is the command to run."""
    controller = operation.controller
    seen = controller_identity.is_alive(controller) is not None
    gone = "is no longer running" if seen else "has sent no heartbeat lately"
    which = f"its controller, process {controller.pid} on {controller.host},"
    if not controller.pid:  # the controller recorded that it gave up control
        which, gone = f"its controller on {controller.host}", "has given up control"
    command = _by_hand(operation.guest, kind, arguments) if operation.kind == MIGRATE else None
    by_hand = f"on {operation.source or 'the source'}, run {command}"
    return OrphanedJobs(
        f"{operation.id} is orphaned: {which} {gone}; nothing was done",
        hint="run vmckpt recover" if command is None else by_hand,
    )


def _by_hand(guest: str, kind: RequestKind, arguments: Mapping[str, Any]) -> str | None:
    """Return the virsh command that has the same effect on a migration as the request.

    None: there is no such command.
    """
    match kind:
        case RequestKind.BANDWIDTH:
            rate = arguments.get("bytes_per_second")
            # 0 means no limit; virsh takes MiB/s.
            return f"virsh migrate-setspeed {guest} {0 if rate is None else max(1, rate >> 20)}"
        case RequestKind.MAX_DOWNTIME:
            return f"virsh migrate-setmaxdowntime {guest} {round(arguments['seconds'] * 1000)}"
        case RequestKind.POSTCOPY:
            return f"virsh migrate-postcopy {guest}"
        case RequestKind.CANCEL:
            return f"virsh domjobabort {guest}"
        case RequestKind.PAUSE:
            return f"virsh suspend {guest}"
        case RequestKind.GO_ON:
            return None  # only jobs on all guests of a host can be paused, and so be continued
