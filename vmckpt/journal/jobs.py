"""What front ends may do with the journal: look at jobs, follow one, and ask something of it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    """What became of a request."""

    ok: bool
    text: str


Direct = Callable[[Operation, RequestKind, Mapping[str, Any]], Answer]
"""Does to a guest what its controller can no longer do; raises VmckptError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job in a list."""

    operation: Operation
    attended: bool | None
    """Whether its controller lives: seen here, or heard of in time from another machine. None if
    nothing is known of it. Of a job that has ended it means nothing."""
    sample: StoredSample | None
    """The last one of an active job."""

    @property
    def unattended(self) -> bool:
        return self.operation.active and self.attended is False

    @property
    def doing(self) -> str:
        """In a word: how it ended, that nobody attends it, or what it does."""
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
        told["unattended"] = self.unattended
        told["done"] = self.sample.done if self.sample else None
        return told


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetail:
    """Everything there is on one job."""

    view: JobView
    forecast: StoredForecast | None
    events: Sequence[StoredEvent]
    samples: Sequence[StoredSample]
    requests: Sequence[Request]
    steps: Sequence[StoredStep] = ()
    """What was changed or was about to be."""

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
    """What is new of a job since the last look."""

    view: JobView
    events: Sequence[StoredEvent]
    samples: Sequence[StoredSample]
    requests: Sequence[Request] = ()
    """All of them: an answer comes later."""
    parts: Sequence[JobView] = ()
    """The migrations of a job of a whole host."""
    steps: Sequence[StoredStep] = ()
    """What that job itself has done."""


def open_journal(*, read_only: bool = False) -> "Journal":
    """The journal of whoever runs this."""
    # Only who reads a journal pays for loading the database library.
    from vmckpt.journal.store import Journal  # noqa: PLC0415

    return Journal(read_only=read_only or looks_only())


def jobs(
    journal: "Journal", *, everything: bool = False, limit: int = 50, guest: str | None = None
) -> list[JobView]:
    """Active jobs, and with `everything` so many that have ended, of one guest or all; the latest
    first."""
    found = journal.operations(active=True, guest=guest)
    if everything:
        found += journal.operations(active=False, limit=limit, guest=guest)
        found.sort(key=lambda one: one.began_at, reverse=True)
    return _views(journal, found)


def job(journal: "Journal", name: str) -> JobDetail:
    """One job by its id, the beginning of it, or its guest. Raises BadInput with likely names."""
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
    """Snapshots of a guest that have ended, the latest first; none without a journal."""
    try:
        with open_journal() as journal:
            return journal.snapshots(guest_uuid)
    except JournalError:
        return ()


def past_moves(source: str, target: str) -> Sequence[PastMove]:
    """Migrations between two hosts that have ended, the latest first; none without a journal."""
    try:
        with open_journal() as journal:
            return journal.recent_moves(source, target)
    except JournalError:
        return ()


def _view(journal: "Journal", operation: Operation) -> JobView:
    return _views(journal, [operation])[0]


def _views(journal: "Journal", found: Sequence[Operation]) -> list[JobView]:
    """With what is known of those that are active."""
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
    """Whether an active operation's controller lives; None if nothing is known of it."""
    if operation.controller.entrusted:
        return True  # by the agents on its hosts
    alive = controller_identity.is_alive(operation.controller)
    if alive is not None or operation.alive_until is None:
        return alive
    return controller_lease.attended(None, operation.alive_until, journal.now())


def interrupted(guest_uuid: str) -> str | None:
    """The job of a guest that its controller has left; None: there is none. Raises JournalError."""
    if location.default() == location.NONE:
        return None
    with open_journal() as journal:
        found = (one.id for one in journal.abandoned() if one.guest_uuid == guest_uuid)
        return next(found, None)


def require_not_delegated(guest: str) -> None:
    """Raise GuestLocked if agents on hosts have a guest (a name or UUID) in their hands: it stands
    still many times a second, and whatever else is seen of it then means nothing."""
    if location.default() == location.NONE:
        return
    with open_journal() as journal:
        for one in journal.delegated_to_agents():
            if one.kind != MAINTENANCE and guest in (one.guest, one.guest_uuid):
                raise GuestLocked(
                    f"guest {one.guest} is protected ({one.id}), by agents on"
                    f" {one.controller.host}; nothing was changed",
                    hint=f"run vmckpt unprotect {one.guest} first",
                )


def require_unlocked(guest_uuid: str) -> None:
    """Raise GuestLocked if a job has the lease on a guest. Raises JournalError."""
    if location.default() == location.NONE:
        return
    with open_journal() as journal:
        held = journal.holder(guest_resource(guest_uuid))
    if held is not None:
        raise GuestLocked(
            f"{held.kind} {held.id} has it in its hands",
            hint=f"vmckpt watch {held.id} shows what it does",
        )


class Follower:
    """Follows one job; each `look` brings what is new since the one before."""

    def __init__(self, journal: "Journal", name: str) -> None:
        self.id = journal.operation(name).id
        self._journal = journal
        self._event = self._sample = 0

    def look(self) -> News:
        found = news(self._journal, self.id, self._event, self._sample)
        self._event = found.events[-1].seq if found.events else self._event
        self._sample = found.samples[-1].seq if found.samples else self._sample
        return found


def news(journal: "Journal", id_: str, event: int, sample: int) -> News:
    """What came after that event and that sample. Raises BadInput if there is no such job."""
    # First the operation: once that has ended, nothing comes after what is read then.
    view = _view(journal, journal.operation(id_, ended=True))
    whole = view.operation.kind in WHOLE_HOST
    return News(
        view=view, events=journal.events(id_, event), samples=journal.samples(id_, sample),
        requests=journal.requests(id_), parts=parts(journal, id_) if whole else (),
        steps=journal.steps(id_) if whole else (),
    )  # fmt: skip


def parts(journal: "Journal", id_: str) -> list[JobView]:
    """The migrations of a job of a whole host, the first one first."""
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
    """Ask something of a running job and wait for the answer.

    If its controller is dead, `direct` does it. Raises BadInput if there is no such job or it has
    ended, OrphanedJobs if no controller could be asked (then nothing was done), and OutcomeUnknown
    if it was taken but not answered.
    """
    operation = journal.operation(job)
    if not operation.active:
        raise BadInput(
            f"job {operation.id} has ended: {operation.outcome}",
            hint=f"vmckpt job {operation.id} tells how",
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
            f"the controller of {operation.id} did not listen for {patience:.0f} s; the request"
            " was withdrawn and nothing was done",
            hint="try again",
        )
    late = journal.request(request)
    if late.ok is not None:
        return Answer(ok=late.ok, text=late.answer or "")
    raise OutcomeUnknown(
        f"{operation.id} took the request and did not answer within {patience:.0f} s; it may or"
        " may not be done",
        host=operation.source or operation.controller.host,
        hint=f"look with vmckpt job {operation.id}",
    )


def _without_it(
    operation: Operation, kind: RequestKind, arguments: Mapping[str, Any], direct: Direct | None
) -> Answer:
    """What is asked of a job whose controller is dead. Raises OrphanedJobs."""
    if direct is not None and operation.kind == MIGRATE:
        return direct(operation, kind, arguments)
    raise unattended(operation, kind, arguments)


def refuse_uncontrolled(operation: Operation) -> None:
    """Raise BadInput for a job that has no controller, and needs none."""
    if operation.kind == MAINTENANCE:
        raise BadInput(
            f"{operation.id} says that {operation.source} is in maintenance",
            hint=f"vmckpt maintenance leave {operation.source} ends it",
        )
    if operation.controller.entrusted:
        raise BadInput(
            f"{operation.id} is a {operation.kind} job, which agents on its hosts go on with",
            hint=f"vmckpt unprotect {operation.guest} ends it",
        )


def _wait(
    journal: "Journal", operation: Operation, request: int, patience: Seconds
) -> Answer | None:
    """The answer; None if there is none in time, or nobody left to give it."""
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
    """The error for a job that nobody attends, with what does the same by hand."""
    controller = operation.controller
    seen = controller_identity.is_alive(controller) is not None
    gone = "has ended" if seen else "has not been heard of lately"
    which = f"its controller, process {controller.pid} on {controller.host},"
    if not controller.pid:  # it wrote down that it leaves
        which, gone = f"its controller on {controller.host}", "has left it"
    command = _by_hand(operation.guest, kind, arguments)
    by_hand = f"on {operation.source or 'the source'}, run {command}"
    return OrphanedJobs(
        f"nobody attends {operation.id} any more: {which} {gone}; nothing was done",
        # Only of a migration libvirt itself knows anything.
        hint=by_hand if operation.kind == MIGRATE else "run vmckpt recover",
    )


def _by_hand(guest: str, kind: RequestKind, arguments: Mapping[str, Any]) -> str:
    """What does the same without us."""
    match kind:
        case RequestKind.BANDWIDTH:
            rate = arguments.get("bytes_per_second")
            # 0 is no limit; virsh counts in MiB/s.
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
            return f"virsh resume {guest}"
