"""Rules of a guarded command: request, result, and when the guest is rolled back. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import Any

from vmckpt.errors import some
from vmckpt.model.guest import GuestState
from vmckpt.snapshot.guard import in_words
from vmckpt.snapshot.request import Restored, Taken
from vmckpt.units import Seconds

TAG = "guard"
"""Tag with the name of the guarded command; its arguments are omitted, as they may be secret."""
CHECK_FOR = Seconds(60.0)
_LONGEST_TAG = 255


class Ending(StrEnum):
    """What happened to the guest and its checkpoint after a guarded command."""

    KEPT = "kept"
    """The command and the checks succeeded; the checkpoint was kept."""
    DROPPED = "dropped"
    """The command and the checks succeeded; the checkpoint was deleted."""
    BACK = "back"
    """The guest was rolled back to the checkpoint, which was kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRequest:
    """A request to guard a command with a checkpoint of a guest."""

    guest: str
    command: Sequence[str]
    name: str | None = None
    """Name of the snapshot; None: the current time."""
    check: str | None = None
    """A shell command that exits with 0 if the guest is fine."""
    check_for: Seconds = CHECK_FOR
    """A failing check is retried for this long."""
    drop: bool = False
    """Whether the checkpoint is deleted if the command succeeds."""
    on_restore: str | None = None
    """Hook that is run after a rollback; see RestoreRequest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardResult:
    """The result of a guarded command."""

    ending: Ending
    why: str
    """What went wrong with the command or the guest; empty if nothing went wrong."""
    stopped: bool
    """Whether the operator interrupted the command."""
    command: int
    """The command's exit status, or -N if signal N killed the command."""
    checks: int
    """Number of times that the guest was checked."""
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
    """Return the tags of the checkpoint."""
    name = "".join(one for one in PurePath(command[0]).name if one.isprintable())
    return {TAG: name[:_LONGEST_TAG] or "?"}


def guard_env(taken: Taken) -> Mapping[str, str]:
    """Return the environment variables for command and check."""
    return {
        "VMCKPT_SNAPSHOT": taken.id,
        "VMCKPT_GUEST": taken.guest,
        "VMCKPT_HOST": taken.host,
    }


def wrong_with_command(status: int, *, stopped: bool) -> str:
    """Return why the command's result alone requires a rollback; empty if it does not.

    `stopped`: the operator interrupted the command.
    """
    if stopped:
        return "the command was interrupted"
    return "" if status == 0 else f"the command failed: {in_words(status)}"


def wrong_with_guest(
    states: Mapping[str, GuestState], silent: Sequence[str], *, was_paused: bool
) -> str:
    """Return why a guest does not count as running; empty if it does.

    `states` are the guest's states, by host; `silent` are the hosts that do not answer.
    `was_paused`: the guest was paused before the command.
    """
    fine = {GuestState.RUNNING, GuestState.BLOCKED}
    if was_paused:
        fine.add(GuestState.PAUSED)
    if any(state in fine for state in states.values()):
        return ""
    if states:
        host, state = next(iter(states.items()))
        return f"the guest is {state.in_words} on {host}"
    unknown = f"; no answer from {some(silent)}" if silent else ""
    return f"the guest is not running on any host{' that answers' if silent else ''}{unknown}"


def way_back(snapshot: str, store: str) -> str:
    """Return the command with which the operator can roll the guest back.

    `snapshot`: the checkpoint's ID; `store`: the name of the store that has it.
    """
    return f"vmckpt snapshot restore {snapshot} --store {store} --replace"
