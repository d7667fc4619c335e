"""Powering a host off from outside, by a fence agent of ClusterLabs: what one is told, and what its
answers mean. Pure.

An agent reads its options as lines `name=value`; its exit code is the answer. `off`: 0 if the host
is off. `status`: 0 if it is on, 2 if it is off, 1 if the device cannot be asked. Shells and
interpreters end with 2, too, if an agent is broken: a status of 2 counts only after the same agent
has ended `off` with 0. To switch off what is off already is nothing, so all of it may be repeated.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from vmckpt.units import Seconds, show_seconds

PASSWORD = "password"
PASSWORD_FILE = "password_file"
"""Ours, not the agents': the password is in the file's first line."""
STAYS_ON = Seconds(30.0)
"""For so long after `off` the status may be another one."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_OURS = frozenset({"action", "option"})
# What agents made with the common library say; all else that they say may hold a secret.
_KNOWN_WORDS = (
    "Unable to connect/login to fencing device",
    "Connection lost",
    "Connection timed out",
    "Timed out waiting to power OFF",
    "Unable to obtain correct plug status or plug is not available",
    "You have to set login name",
    "You have to set login password",
    "You have to enter fence address",
    "You have to enter password or password script",
    "You have to enter plug number or machine identification",
    "not found or not accessible",
    "The user does not have the correct privileges to do the requested action",
    "Unrecognised action",
)


class Action(StrEnum):
    """What an agent is asked for. Never "reboot": the host must stay off."""

    OFF = "off"
    STATUS = "status"


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceDevice:
    """What powers a host off: an entry of the inventory."""

    agent: str
    """By name, or its whole path."""
    options: Mapping[str, str] = field(repr=False)
    """The agent's own; secrets among them."""
    password_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Ran:
    """How one run of an agent ended."""

    status: int | None
    """Its exit code, or minus the signal that ended it; None: it had no end in time."""
    limit: Seconds
    said: str | None = None
    """See `known_words`."""

    @property
    def in_words(self) -> str:
        """For people: "it ended with 1: Connection timed out"."""
        if self.status is None:
            return f"no answer in {show_seconds(self.limit)}"
        if self.status < 0:
            return f"it was ended by signal {-self.status}"
        return f"it ended with {self.status}" + (f": {self.said}" if self.said else "")


class Power(StrEnum):
    """Whether a host is on."""

    ON = "on"
    OFF = "off"
    UNKNOWN = "unknown"


def power(status: Ran) -> Power:
    """What an answer to `status` means."""
    match status.status:
        case 0:
            return Power.ON
        case 2:
            return Power.OFF
        case _:
            return Power.UNKNOWN


class Step(StrEnum):
    """What is done next."""

    SWITCH_OFF = "switch off"
    LOOK = "look"
    OFF = "off"
    """The host is off; nothing more is done."""
    REFUSE = "refuse"
    """It is not known to be off."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done next, and why."""

    step: Step
    why: str = ""


def decide(off: Ran | None, status: Ran | None, waited: Seconds) -> Decision:
    """By the last answers to both actions; `waited`: since `off` was answered."""
    if off is None:
        return Decision(Step.SWITCH_OFF)
    if off.status != 0:
        return Decision(Step.REFUSE, f"it could not be switched off: {off.in_words}")
    if status is None:
        return Decision(Step.LOOK)
    found = power(status)
    if found is Power.OFF:
        return Decision(Step.OFF)
    if waited < STAYS_ON:
        return Decision(Step.LOOK)
    if found is Power.ON:
        return Decision(Step.REFUSE, "it was switched off, and is on nevertheless")
    return Decision(Step.REFUSE, f"whether it is off cannot be found out: {status.in_words}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """A host that is off, and who says so."""

    host: str
    agent: str
    at: float
    """When its agent said so, in seconds of the epoch."""
    took: Seconds

    def as_json(self) -> dict[str, Any]:
        return {
            "host": self.host, "agent": self.agent, "answered": str(Power.OFF), "at": self.at,
            "took": self.took,
        }  # fmt: skip


def known_words(text: str) -> str | None:
    """What of an agent's words may be told: those that all agents have in common."""
    return next((words for words in _KNOWN_WORDS if words in text), None)


def check_option(name: str, value: object) -> str:
    """An option's value. Raises ValueError, which never has the value in it."""
    if not _NAME.fullmatch(name):
        raise ValueError("a name in it is none of an option; write a space after each colon")
    if name.lower().replace("-", "_") in _OURS:
        raise ValueError(f"{name} is not yours to set: it is off or status, never another")
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text; put it in quotes")
    if not value or not value.isprintable() or value != value.strip():
        raise ValueError(f"{name} must be one line that can be read, with nothing around it")
    return value


def told(device: FenceDevice, action: Action, password: str | None) -> bytes:
    """What an agent reads. Raises ValueError, see `check_option`."""
    options = {**device.options} if password is None else {**device.options, PASSWORD: password}
    lines = [f"{name}={check_option(name, value)}" for name, value in options.items()]
    # Of what is written twice the last is taken.
    return "".join(f"{line}\n" for line in [*lines, f"action={action}"]).encode()
