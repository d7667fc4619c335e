"""Powering a host off from outside, by fence agents of ClusterLabs: what one is told, what its
answers mean, and which device is asked next. Pure.

An agent reads its options as lines `name=value`; its exit code is the answer. `off`: 0 if the
device is off. `status`: 0 if it is on, 2 if it is off, 1 if the device cannot be asked. Shells and
interpreters end with 2, too, if an agent is broken: a status of 2 counts only after the same agent
has ended `off` with 0. To switch off what is off already is nothing, so all of it may be repeated.

A host may have several devices in levels (Pacemaker's fencing topology). The levels are tried in
turn. A level succeeds if all of its devices report off: a host with two power supplies is off only
without both.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from vmckpt.units import Seconds, show_seconds

PASSWORD = "password"
PASSWORD_FILE = "password_file"
"""Ours, not the agents': the password is in the file's first line."""
STAYS_ON = Seconds(30.0)
"""For so long after the last `off` of a level the status may be another one."""
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
    """A device that takes power from a host: an entry of the inventory."""

    agent: str
    """By name, or its whole path."""
    options: Mapping[str, str] = field(repr=False)
    """The agent's own; secrets among them."""
    password_file: Path | None = None


@dataclass(frozen=True, slots=True)
class FenceTopology:
    """What powers a host off: levels of devices, in the order in which they are tried."""

    levels: tuple[tuple[FenceDevice, ...], ...]
    """None is empty."""

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Each device's level and number in it, from 0."""
        return tuple(
            (level, number)
            for level, those in enumerate(self.levels)
            for number in range(len(those))
        )

    def name(self, level: int, number: int) -> str:
        """Name a device for people: its agent, and its place where there are several."""
        agent, place = self.levels[level][number].agent, []
        if len(self.levels) > 1:
            place.append(f"level {level + 1}")
        if (many := len(self.levels[level])) > 1:
            place.append(f"device {number + 1} of {many}")
        return f"{agent} ({', '.join(place)})" if place else agent

    def level_in_words(self, level: int) -> str:
        """Name a level for people: "fence_apc and fence_apc"."""
        return " and ".join(one.agent for one in self.levels[level])

    @property
    def in_words(self) -> str:
        """For people: "fence_ipmilan, else fence_apc and fence_apc"."""
        return ", else ".join(self.level_in_words(level) for level in range(len(self.levels)))


@dataclass(frozen=True, slots=True)
class Ran:
    """How one run of an agent ended."""

    status: int | None
    """Its exit code, or minus the signal that ended it; None: it had no end in time."""
    limit: Seconds
    said: str | None = None
    """See `known_words`."""
    error: str | None = None
    """Why it could not be run at all; `status` is None then."""

    @property
    def in_words(self) -> str:
        """For people: "it ended with 1: Connection timed out"."""
        if self.error is not None:
            return self.error
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


@dataclass(frozen=True, slots=True)
class Tried:
    """What has been heard about one level so far."""

    off: tuple[Ran, ...] = ()
    """The answers to `off`, one of each device, in the devices' order."""
    looks: tuple[Ran, ...] = ()
    """The answers to `status`, all given after the last `off`: one of each device, then the second
    one of each, and so on."""
    host_answers: bool | None = None
    """Whether the host itself still answers; None: it was not asked."""


class Step(StrEnum):
    """What is done next."""

    SWITCH_OFF = "switch off"
    LOOK = "look"
    """Ask the device for its status."""
    KNOCK = "knock"
    """See whether the host itself answers."""
    NEXT_LEVEL = "next level"
    OFF = "off"
    """The host is off; nothing more is done."""
    REFUSE = "refuse"
    """It is not known to be off."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done next, and why."""

    step: Step
    number: int = 0
    """The device in the last level that was tried, from 0."""
    why: str = ""
    """With NEXT_LEVEL why this one failed, with REFUSE why all did."""


def decide(topology: FenceTopology, tried: Sequence[Tried], waited: Seconds) -> Decision:
    """Decide by what was heard: `tried` are the levels in their order, the last one is under way.

    `waited`: since the last `off` of that level was answered.
    """
    found = _decide_level(topology, len(tried) - 1, tried[-1], waited)
    if found.step is not Step.REFUSE:
        return found
    if len(tried) < len(topology.levels):
        return Decision(Step.NEXT_LEVEL, why=found.why)
    # Why the others failed follows from the same rules; their time was up, or they had failed.
    others = [
        _decide_level(topology, level, one, STAYS_ON).why for level, one in enumerate(tried[:-1])
    ]
    return Decision(Step.REFUSE, why=", and ".join([*others, found.why]))


def _decide_level(topology: FenceTopology, level: int, tried: Tried, waited: Seconds) -> Decision:
    """As `decide`, of one level alone.

    All devices are switched off first. Then they are asked in rounds, and only a round in which all
    say off counts: each was off when its `off` was answered and is off after the last `off`, so
    there was a moment at which the host had no power.
    """
    count = len(topology.levels[level])
    for number, ran in enumerate(tried.off):
        if ran.status != 0:
            why = f"it could not be switched off: {ran.in_words}"
            return _refuse(topology, level, number, why)
    if len(tried.off) < count:
        return Decision(Step.SWITCH_OFF, len(tried.off))
    if not tried.looks or len(tried.looks) % count:
        return Decision(Step.LOOK, len(tried.looks) % count)
    found = [power(ran) for ran in tried.looks]
    last = found[-count:]
    if all(one is Power.OFF for one in last):
        return _decide_by_host(topology, level, tried.host_answers)
    for number, now in enumerate(last):
        if now is Power.ON and Power.OFF in found[number::count]:
            return _refuse(topology, level, number, "it was off, and is on again")
    if waited < STAYS_ON:
        return Decision(Step.LOOK)
    number = next(number for number, now in enumerate(last) if now is not Power.OFF)
    why = "it was switched off, and is on nevertheless"
    if last[number] is Power.UNKNOWN:
        told = tried.looks[number - count].in_words
        why = f"whether it is off cannot be found out: {told}"
    return _refuse(topology, level, number, why)


def _decide_by_host(topology: FenceTopology, level: int, answers: bool | None) -> Decision:
    if answers is None:
        return Decision(Step.KNOCK)
    if not answers:
        return Decision(Step.OFF)
    agents = topology.level_in_words(level)
    return Decision(
        Step.REFUSE, why=f"{agents}: off is said, but it answers: that is about another machine"
    )


def _refuse(topology: FenceTopology, level: int, number: int, why: str) -> Decision:
    return Decision(Step.REFUSE, number, f"{topology.name(level, number)}: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """A host that is off, and which devices say so."""

    host: str
    agent: str
    """The agents of the level that succeeded."""
    level: int
    """From 1."""
    devices: tuple[str, ...]
    """Each device of that level, see `FenceTopology.name`."""
    at: float
    """When the last of them said so, in seconds of the epoch."""
    took: Seconds

    def as_json(self) -> dict[str, Any]:
        return {
            "host": self.host, "agent": self.agent, "level": self.level,
            "devices": list(self.devices), "answered": str(Power.OFF), "at": self.at,
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
