"""A risky command under guard: what is asked, what it came to, when the guest goes back. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import Any

from vmckpt.model.guest import GuestState
from vmckpt.snapshot.guard import in_words
from vmckpt.snapshot.request import Restored, Taken
from vmckpt.units import Seconds

TAG = "guard"
"""Names the program for which a snapshot was taken; its arguments may be secrets."""
CHECK_FOR = Seconds(60.0)
_LONGEST_TAG = 255


class Ending(StrEnum):
    """What became of the guest and its checkpoint."""

    KEPT = "kept"
    """All is well; the checkpoint stays in the store."""
    DROPPED = "dropped"
    """All is well; the checkpoint is deleted."""
    BACK = "back"
    """The guest is as it was at the checkpoint, which stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRequest:
    """What the operator asked for."""

    guest: str
    command: Sequence[str]
    name: str | None = None
    """Of the snapshot; None: the time."""
    check: str | None = None
    """A line of shell that ends with 0 if all is well."""
    check_for: Seconds = CHECK_FOR
    """For so long it is tried again."""
    drop: bool = False
    """The checkpoint is deleted if all is well."""
    on_restore: str | None = None
    """Run if the guest went back; see RestoreRequest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardResult:
    """How it ended."""

    ending: Ending
    why: str
    """What went wrong; empty if nothing did."""
    stopped: bool
    """The operator broke it off."""
    command: int
    """The command's exit status, or minus the signal that ended it."""
    checks: int
    """How often the guest was looked at."""
    taken: Taken
    restored: Restored | None
    job: str | None

    def as_json(self) -> dict[str, Any]:
        return {
            "ending": str(self.ending),
            "why": self.why or None,
            "stopped": self.stopped,
            "command_status": self.command,
            "checks": self.checks,
            "guest": self.taken.guest,
            "snapshot": self.taken.as_json(),
            "restored": None if self.restored is None else self.restored.as_json(),
            "job": self.job,
        }


def tags(command: Sequence[str]) -> dict[str, str]:
    """What the checkpoint is labelled with."""
    name = "".join(one for one in PurePath(command[0]).name if one.isprintable())
    return {TAG: name[:_LONGEST_TAG] or "?"}


def guard_env(taken: Taken) -> Mapping[str, str]:
    """What command and check find in their environment."""
    return {
        "VMCKPT_SNAPSHOT": taken.id,
        "VMCKPT_GUEST": taken.guest,
        "VMCKPT_HOST": taken.host,
    }


def wrong_with_command(status: int, *, stopped: bool) -> str:
    """Why its end alone takes the guest back; empty if it does not."""
    if stopped:
        return "it was broken off"
    return "" if status == 0 else f"the command failed: {in_words(status)}"


def wrong_with_guest(
    states: Mapping[str, GuestState], silent: Sequence[str], *, was_paused: bool
) -> str:
    """Why a guest does not count as running; empty if it does.

    `states`: by host; `silent`: hosts that do not answer.
    """
    fine = {GuestState.RUNNING, GuestState.BLOCKED}
    if was_paused:
        fine.add(GuestState.PAUSED)
    if any(state in fine for state in states.values()):
        return ""
    if states:
        host, state = next(iter(states.items()))
        return f"the guest is {state} on {host}"
    return f"the guest runs nowhere{f'; {silent[0]} does not answer' if silent else ''}"


def way_back(snapshot: str, store: str) -> str:
    """What takes the guest back by hand."""
    return f"vmckpt snapshot restore {snapshot} --store {store} --replace"
