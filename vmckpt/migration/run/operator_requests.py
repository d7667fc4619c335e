"""Turn requests from other terminals into actions on a running migration, or refusals. Pure."""

from collections.abc import Mapping
from typing import Any, Protocol

from vmckpt.journal.records import Request, RequestKind
from vmckpt.migration.run.actions import (
    Abort,
    Action,
    LimitBandwidth,
    PauseGuest,
    SetDowntime,
    Stop,
    SwitchToPostcopy,
)
from vmckpt.migration.run.decide import AppliedActions, RunTerms
from vmckpt.units import BytesPerSecond, Seconds

NO_WAY_BACK = (
    "the migration is in post-copy: it cannot be cancelled, and only its bandwidth can be changed"
)


class StepLog(Protocol):
    """Requests from other terminals, and the journal of a migration's steps."""

    def take_requests(self) -> list[Request]:
        """Return new requests since the last call; each must be answered. Raises LeaseLost."""

    def answer(self, request: Request, *, ok: bool, text: str) -> None:
        """Answer a request. `ok`: whether it was carried out; `text`: the answer."""

    async def intend(self, step: str, intent: Mapping[str, Any]) -> None:
        """Record what is about to be done to the guest. Raises JournalError or LeaseLost.

        `step`: the step's name; `intent`: what recovery needs to know about the step, as JSON.
        """

    async def refused(self, step: str) -> None:
        """Record that the last step of this name was not carried out.

        Raises LeaseLost.
        """


def resolve_request(
    request: Request, terms: RunTerms, done: AppliedActions, *, moves: bool, stopping: bool
) -> Action | str:
    """Return the action that a request asks for, or a refusal in words.

    `moves`: memory is being sent. `stopping`: the migration is being stopped.
    """
    try:
        kind = RequestKind(request.kind)
        wanted = _wanted(kind, request.arguments)
    except (ValueError, KeyError, TypeError, OverflowError):
        return f"{request.kind} {dict(request.arguments)} is not a valid request"
    return _refusal(kind, terms, done, moves, stopping) or wanted


def _wanted(kind: RequestKind, arguments: Mapping[str, Any]) -> Action:
    match kind:
        case RequestKind.BANDWIDTH:
            rate = arguments["bytes_per_second"]
            return LimitBandwidth(None if rate is None else BytesPerSecond(int(_positive(rate))))
        case RequestKind.MAX_DOWNTIME:
            return SetDowntime(Seconds(_positive(arguments["seconds"])))
        case RequestKind.POSTCOPY:
            return SwitchToPostcopy()
        case RequestKind.PAUSE:
            return PauseGuest()
        case RequestKind.CANCEL:
            return Abort(Stop.OPERATOR)
        case RequestKind.GO_ON:
            raise ValueError(kind)


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError(value)
    return number


def _refusal(
    kind: RequestKind, terms: RunTerms, done: AppliedActions, moves: bool, stopping: bool
) -> str | None:
    if done.switched and kind is not RequestKind.BANDWIDTH:
        return NO_WAY_BACK
    if stopping and kind is not RequestKind.CANCEL:
        return "the migration is being stopped"
    if kind is RequestKind.POSTCOPY and not terms.post_copy:
        return f"this migration cannot switch to post-copy: it was started in mode {terms.mode}"
    if kind in (RequestKind.POSTCOPY, RequestKind.PAUSE) and not moves:
        return "no memory is being sent now; try again in a second"
    if kind is RequestKind.PAUSE and done.paused:
        return "the guest is already paused"
    return None
