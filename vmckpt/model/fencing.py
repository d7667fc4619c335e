"""Fencing by ClusterLabs' fence agents: an agent's input, its exit codes, and the next step. Pure.

An agent reads its options as lines `name=value`, and its exit code is the answer. For `off`, 0
means that the device is off. For `status`, 0 means on, 2 means off, and 1 that the device cannot be
queried. A broken agent may also exit with 2, as shells and interpreters do. So a status of 2 counts
only after the same agent has answered `off` with 0. All steps can be repeated, as switching off a
device that is off has no effect.

A host may have several devices in levels (Pacemaker's fencing topology). The levels are tried in
order. A level succeeds if all of its devices report off: a host with two power supplies is off only
if both are off.
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
"""An option of vmckpt, not of an agent: a file with the password in its first line."""
STAYS_ON = Seconds(30.0)
"""How long after the last `off` of its level a device may still report that it is on."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_OURS = frozenset({"action", "option"})
# Messages of the agents' common library; any other output may contain a secret.
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
    """An action of a fence agent. "reboot" is never used: the host must stay off."""

    OFF = "off"
    STATUS = "status"


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceDevice:
    """A device that can power a host off: an entry of the inventory."""

    agent: str
    """Name or absolute path of the device's agent."""
    options: Mapping[str, str] = field(repr=False)
    """Options for the agent, which may include secrets."""
    password_file: Path | None = None


@dataclass(frozen=True, slots=True)
class FenceTopology:
    """The devices that can power a host off: levels, in the order in which they are tried."""

    levels: tuple[tuple[FenceDevice, ...], ...]
    """The devices of each level; no level is empty."""

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Level of each device, and its number in that level, from 0."""
        return tuple(
            (level, number)
            for level, those in enumerate(self.levels)
            for number in range(len(those))
        )

    def name(self, level: int, number: int) -> str:
        """Return a device's name for messages: its agent, and its place if there are several."""
        agent, place = self.levels[level][number].agent, []
        if len(self.levels) > 1:
            place.append(f"level {level + 1}")
        if (many := len(self.levels[level])) > 1:
            place.append(f"device {number + 1} of {many}")
        return f"{agent} ({', '.join(place)})" if place else agent

    def level_in_words(self, level: int) -> str:
        """Return a level's name for messages: "fence_apc and fence_apc"."""
        return " and ".join(one.agent for one in self.levels[level])

    @property
    def in_words(self) -> str:
        """All levels, for messages: "fence_ipmilan, else fence_apc and fence_apc"."""
        return ", else ".join(self.level_in_words(level) for level in range(len(self.levels)))


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of one run of an agent."""

    status: int | None
    """Exit code, or minus the signal that killed the agent; None: the agent did not exit in
    time."""
    limit: Seconds
    said: str | None = None
    """The agent's message, see `known_words`."""
    error: str | None = None
    """Why the agent could not be run at all; `status` is then None."""

    @property
    def in_words(self) -> str:
        """The result, for messages: "the fence agent exited with 1: Connection timed out"."""
        if self.error is not None:
            return self.error
        if self.status is None:
            return f"no answer within {show_seconds(self.limit)}"
        if self.status < 0:
            return f"the fence agent was killed by signal {-self.status}"
        why = f": {self.said}" if self.said else ""
        return f"the fence agent exited with {self.status}{why}"


class Power(StrEnum):
    """Whether a host is on."""

    ON = "on"
    OFF = "off"
    UNKNOWN = "unknown"


def power(status: Ran) -> Power:
    """Return the power state according to an agent's answer to `status`."""
    match status.status:
        case 0:
            return Power.ON
        case 2:
            return Power.OFF
        case _:
            return Power.UNKNOWN


@dataclass(frozen=True, slots=True)
class Tried:
    """The answers from one level so far."""

    off: tuple[Ran, ...] = ()
    """The devices' answers to `off`, in order."""
    looks: tuple[Ran, ...] = ()
    """The answers to `status`, all after the last `off`: one from each device, then a second one
    from each, and so on."""
    host_answers: bool | None = None
    """Whether the host itself still answers; None: not checked."""


class Step(StrEnum):
    """The next step of fencing a host."""

    SWITCH_OFF = "switch off"
    LOOK = "look"
    """Query a device's status."""
    KNOCK = "knock"
    """Check whether the host itself answers."""
    NEXT_LEVEL = "next level"
    OFF = "off"
    """Done: the host is off."""
    REFUSE = "refuse"
    """Failed: the host is not known to be off."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The next step, and why."""

    step: Step
    number: int = 0
    """Number of the device in the current level, from 0."""
    why: str = ""
    """With NEXT_LEVEL, why this level failed; with REFUSE, why all levels failed."""


def decide(topology: FenceTopology, tried: Sequence[Tried], waited: Seconds) -> Decision:
    """Return the next step after these answers.

    `tried`: the levels tried so far, in order; the last one is the current level. `waited`: time
    since the last `off` of that level was answered.
    """
    found = _decide_level(topology, len(tried) - 1, tried[-1], waited)
    if found.step is not Step.REFUSE:
        return found
    if len(tried) < len(topology.levels):
        return Decision(Step.NEXT_LEVEL, why=found.why)
    # The earlier levels failed by the same rules, at the latest when their time was up.
    others = [
        _decide_level(topology, level, one, STAYS_ON).why for level, one in enumerate(tried[:-1])
    ]
    return Decision(Step.REFUSE, why=", and ".join([*others, found.why]))


def _decide_level(topology: FenceTopology, level: int, tried: Tried, waited: Seconds) -> Decision:
    """Return the next step within one level; REFUSE if the level has failed.

    First the power is switched off through each device. Then all devices are queried in rounds. A
    round counts only if every device reports "off". Each device's power was off when the device
    acknowledged `off`, and is still off after the last `off`, so there was a moment at which the
    host had no power.
    """
    count = len(topology.levels[level])
    for number, ran in enumerate(tried.off):
        if ran.status != 0:
            why = f"the host could not be switched off: {ran.in_words}"
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
            return _refuse(topology, level, number, "the device was off and is on again")
    if waited < STAYS_ON:
        return Decision(Step.LOOK)
    number = next(number for number, now in enumerate(last) if now is not Power.OFF)
    why = "the device acknowledged the power-off, but still reports that the power is on"
    if last[number] is Power.UNKNOWN:
        told = tried.looks[number - count].in_words
        why = f"the power state is unknown: {told}"
    return _refuse(topology, level, number, why)


def _decide_by_host(topology: FenceTopology, level: int, answers: bool | None) -> Decision:
    if answers is None:
        return Decision(Step.KNOCK)
    if not answers:
        return Decision(Step.OFF)
    agents = topology.level_in_words(level)
    return Decision(
        Step.REFUSE,
        why=f"{agents}: power off was reported, but the host still answers: the device controls"
        " another machine, or the host has a power supply that is not in the inventory",
    )


def _refuse(topology: FenceTopology, level: int, number: int, why: str) -> Decision:
    return Decision(Step.REFUSE, number, f"{topology.name(level, number)}: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """A host that is off, and the devices that confirmed it."""

    host: str
    agent: str
    """The agents of the level that succeeded."""
    level: int
    """Number of that level, from 1."""
    devices: tuple[str, ...]
    """Names of the devices of that level, see `FenceTopology.name`."""
    at: float
    """When the last device reported off, in seconds since 1970."""
    took: Seconds

    def as_json(self) -> dict[str, Any]:
        return {
            "host": self.host, "agent": self.agent, "level": self.level,
            "devices": list(self.devices), "answered": str(Power.OFF), "at": self.at,
            "took": self.took,
        }  # fmt: skip


def known_words(text: str) -> str | None:
    """Return the part of an agent's output that is safe to show; None if there is none.

    Only messages of the agents' common library are known to contain no secrets.
    """
    return next((words for words in _KNOWN_WORDS if words in text), None)


def check_option(name: str, value: object) -> str:
    """Check an option and return its value. Raises ValueError, without the value in its text."""
    if not _NAME.fullmatch(name):
        raise ValueError("invalid option name; write a space after each colon")
    if name.lower().replace("-", "_") in _OURS:
        raise ValueError(f"{name} cannot be set: vmckpt itself chooses off or status")
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text; put it in quotes")
    if not value or not value.isprintable() or value != value.strip():
        raise ValueError(f"{name} must be one line of printable text without surrounding spaces")
    return value


def told(device: FenceDevice, action: Action, password: str | None) -> bytes:
    """Return the input for an agent. Raises ValueError as `check_option` does.

    `password`: replaces the password among the options; None: the options are used unchanged.
    """
    options = {**device.options} if password is None else {**device.options, PASSWORD: password}
    lines = [f"{name}={check_option(name, value)}" for name, value in options.items()]
    # If an option is given twice, the agent uses the last one, so `action` comes last.
    return "".join(f"{line}\n" for line in [*lines, f"action={action}"]).encode()
