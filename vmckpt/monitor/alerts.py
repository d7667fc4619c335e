"""What an operator is paged for, and when. Time is an argument. Pure."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from vmckpt.journal.follow import ENDED, Happening
from vmckpt.journal.records import FORGOTTEN, utc
from vmckpt.model.migration import Outcome
from vmckpt.monitor.health import Trouble
from vmckpt.units import Seconds

PATIENCE = Seconds(30.0)
"""What lasts no longer is told to nobody: a host that is asked again, a standby that catches up."""
_UNSURE = (Outcome.LOST, Outcome.UNKNOWN, Outcome.POST_COPY_PAUSED)
_BAD = (*_UNSURE, Outcome.FAILED, Outcome.NOT_CONVERGED, Outcome.TIMED_OUT, Outcome.SHUT_OFF)
_NAMESPACE = uuid.UUID("5a2d3c5e-5f0b-4d52-9b38-0f7a1c8f7c11")


class State(StrEnum):
    """Whether it lasts."""

    FIRING = "firing"
    RESOLVED = "resolved"
    """What was firing is over."""
    ONCE = "once"
    """It has happened, and is nothing that lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One message."""

    key: str
    """The same for "firing" and "resolved"."""
    state: State
    at: float
    """Seconds since 1970."""
    trouble: Trouble

    def as_json(self) -> dict[str, Any]:
        """The body that is posted. The id stays the same if it is sent again."""
        one = self.trouble
        id_ = uuid.uuid5(_NAMESPACE, f"{self.key} {self.state} {self.at}")
        return {
            "version": 1, "id": str(id_), "at": utc(self.at), "state": str(self.state),
            "key": self.key, "text": one.text, "mend": one.hint, "job": one.job,
            "guest": one.guest, "host": one.host,
        }  # fmt: skip


def of_happening(one: Happening) -> Page | None:
    """The page for something that happened; None: nobody has to know at once."""
    operation = one.operation
    if one.kind != ENDED:
        return None
    outcome, report = str(one.values["outcome"]), operation.report or {}
    if FORGOTTEN in report:
        return None  # whoever said so knows it
    if operation.kind == "protect" and report.get("failed_over"):
        text = f"{operation.guest} has failed over to {report['failed_over']}: {report.get('why')}"
        hint = f"vmckpt protect {operation.guest} --reverse, once {operation.source} is back"
        return _page(one, text, hint)
    part = operation.detail.get("part_of") is not None
    # Whoever empties a host tries again, and says at the end who is left.
    if outcome not in (_UNSURE if part else _BAD):
        return None
    error = f": {one.values['error']}" if one.values.get("error") else ""
    text = f"{operation.kind} of {operation.guest} ended: {outcome}{error}"
    sure = outcome not in _UNSURE
    hint = f"vmckpt job {operation.id}" if sure else "vmckpt recover"
    return _page(one, text, hint)


def _page(one: Happening, text: str, hint: str) -> Page:
    operation = one.operation
    trouble = Trouble(
        text=text, hint=hint, job=operation.id, guest=operation.guest, host=operation.source
    )
    return Page(key=f"ended {operation.id}", state=State.ONCE, at=one.at, trouble=trouble)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lasting:
    """A trouble, for as long as it lasts."""

    trouble: Trouble
    since: Seconds
    """By a clock that nobody sets."""
    paged: bool = False


def watch(
    known: Mapping[str, Lasting], troubles: Mapping[str, Trouble], now: Seconds, at: float
) -> tuple[Mapping[str, Lasting], Sequence[Page]]:
    """What is known after a look, and what is to be sent: each trouble once it has lasted for
    PATIENCE, and once more when it is over. `now`: by a clock that nobody sets; `at`: for who reads
    it, seconds since 1970."""
    lasting = {
        key: replace(known[key], trouble=one) if key in known else Lasting(trouble=one, since=now)
        for key, one in troubles.items()
    }
    due = [key for key, one in lasting.items() if not one.paged and now - one.since >= PATIENCE]
    pages = [Page(key=key, state=State.FIRING, at=at, trouble=lasting[key].trouble) for key in due]
    pages += _over(known, lasting, at)
    return lasting | {key: replace(lasting[key], paged=True) for key in due}, pages


def _over(
    known: Mapping[str, Lasting], lasting: Mapping[str, Lasting], at: float
) -> Iterable[Page]:
    for key, one in known.items():
        if one.paged and key not in lasting:
            yield Page(key=key, state=State.RESOLVED, at=at, trouble=one.trouble)
