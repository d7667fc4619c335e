"""What other terminals ask of a running migration: an action, or why not. Pure."""

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

NO_WAY_BACK = "it is in post-copy: there is no way back, and nothing to choose but the bandwidth"


class StepLog(Protocol):
    """Where other terminals leave what they want."""

    def take_requests(self) -> list[Request]:
        """New ones since the last call; each must be answered."""

    def answer(self, request: Request, *, ok: bool, text: str) -> None:
        """Say what became of one."""

    async def intend(self, step: str, intent: Mapping[str, Any]) -> None:
        """Write down what is about to be done to the guest. Raises JournalError, LeaseLost."""

    async def refused(self, step: str) -> None:
        """What was intended last under that name was not done."""


def resolve_request(
    request: Request, terms: RunTerms, done: AppliedActions, *, moves: bool, stopping: bool
) -> Action | str:
    """The action that a request asks for; a refusal in words if it cannot be.

    `moves`: the first pass has begun. `stopping`: it is being stopped.
    """
    try:
        kind = RequestKind(request.kind)
        wanted = _wanted(kind, request.arguments)
    except (ValueError, KeyError, TypeError, OverflowError):
        return f"{request.kind} {dict(request.arguments)} is not understood"
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
        return "it is being stopped"
    if kind is RequestKind.POSTCOPY and not terms.post_copy:
        return f"this migration cannot switch: it was started in mode {terms.mode}"
    if kind in (RequestKind.POSTCOPY, RequestKind.PAUSE) and not moves:
        return "memory does not move yet; ask again in a second"
    if kind is RequestKind.PAUSE and done.paused:
        return "the guest stands still already"
    return None
