"""Draw the operations of a chaos campaign from its seed; `chaos.run` carries them out. Pure.

The source of an operation depends on the results of earlier operations, so a target is given as its
distance from the source in the list of hosts.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from vmckpt_lab.command_runner import Moment
from vmckpt_lab.faults.scenarios import Fault
from vmckpt_lab.faults.trial import Ends

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestPlan:
    """A guest of the campaign."""

    name: str
    memory: str
    dirty: str
    busy: bool
    """Whether the guest writes fast enough to prolong the late phases of a migration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A migration and the fault that is injected into it."""

    number: int
    guest: str
    further: int
    """Distance of the target from the source, in the list of hosts."""
    fault: Fault
    moment: Moment
    delay: float
    """Delay from the start of the phase to the fault, in seconds."""
    inside: bool
    """Whether the fault strikes during libvirt's cleanup instead of the controller's."""
    mode: str
    max_downtime: str
    link: str | None
    retry: bool
    """Whether the policy retries after a failure."""
    cancel: bool
    """Whether the operator also cancels the migration."""

    def __str__(self) -> str:
        words = [f"{self.number}: {self.guest} +{self.further}", self.mode]
        words.append(f"over {self.link}" if self.link else "over an unlimited link")
        words.append(f"{self.fault} at {self.moment}" + (" of libvirt" if self.inside else ""))
        words += [f"after {self.delay:g} s"] if self.delay else []
        words += ["with a retry"] if self.retry else []
        words += ["and cancelled"] if self.cancel else []
        return ", ".join(words)


# Weights of the faults. Faults that take a long time are rare.
_FAULTS: Mapping[Fault, int] = {
    Fault.NOTHING: 6,
    Fault.CONTROLLER_KILLED: 14,
    Fault.SOURCE_LIBVIRTD: 6,
    Fault.TARGET_LIBVIRTD: 6,
    Fault.SOURCE_QEMU: 3,
    Fault.TARGET_QEMU: 6,
    Fault.SOURCE_OFF: 2,
    Fault.TARGET_OFF: 4,
    Fault.SOURCE_CUT: 2,
    Fault.TARGET_CUT: 3,
    Fault.CUT_FOR_GOOD: 1,
    Fault.MEMORY_FULL: 2,
    Fault.JOURNAL_FULL: 3,
    Fault.CLOCK_AHEAD: 2,
    Fault.CLOCK_BACK: 2,
    Fault.TWO_SAME: 4,
    Fault.TWO_OTHER: 4,
}
_POSTGRES = 5
_CALM: Mapping[Moment, int] = {
    Moment.PREFLIGHT: 2,
    Moment.SETUP: 3,
    Moment.FIRST: 5,
    Moment.CLEANUP: 3,
}
_BUSY: Mapping[Moment, int] = {
    **_CALM,
    Moment.LATE: 2,
    Moment.SWITCHOVER: 6,
    Moment.POST_COPY: 6,
}
_INSIDE = (
    Fault.SOURCE_LIBVIRTD,
    Fault.TARGET_LIBVIRTD,
    Fault.SOURCE_QEMU,
    Fault.TARGET_QEMU,
    Fault.SOURCE_OFF,
    Fault.TARGET_OFF,
    Fault.TARGET_CUT,
)


def guests(seed: int) -> tuple[GuestPlan, ...]:
    """Return the guests of a campaign: one that writes a lot, and one that writes little."""
    dice = random.Random(f"{seed} guests")
    busy, calm = dice.choice((20, 24, 28)), dice.choice((4, 8, 16))
    # Only slightly faster than 200mbit: if a guest under TCG writes 80 MiB/s and is cut off in a
    # late pass, QEMU 7.2 loses writes, even without vmckpt (docs/adr/0005-tcg-lost-writes.md).
    fast, slow = dice.choice((30, 40)), dice.choice((1, 5, 10))
    return (
        GuestPlan(name="busy", memory="128MiB", dirty=f"{busy}MiB@{fast}MiB/s", busy=True),
        GuestPlan(name="calm", memory="128MiB", dirty=f"{calm}MiB@{slow}MiB/s", busy=False),
    )


def operation(seed: int, number: int, *, postgres: bool = False) -> Operation:
    """Return operation `number` of a campaign, counted from 1.

    `postgres`: whether faults may restart PostgreSQL.
    """
    dice = random.Random(f"{seed} operation {number}")
    wish = dice.choice(guests(seed))
    fault = _drawn(dice, {**_FAULTS, **({Fault.POSTGRES: _POSTGRES} if postgres else {})})
    moment = _drawn(dice, _BUSY if wish.busy else _CALM)
    if fault is Fault.MEMORY_FULL:
        moment = Moment.SETUP
    elif fault is Fault.CUT_FOR_GOOD and moment is Moment.CLEANUP:
        moment = Moment.FIRST
    inside = moment is Moment.CLEANUP and fault in _INSIDE
    return Operation(
        number=number,
        guest=wish.name,
        further=dice.choice((1, 2)),
        fault=fault,
        moment=moment,
        delay=_delay(dice, moment),
        inside=inside,
        mode=_mode(dice, moment),
        max_downtime=_max_downtime(moment),
        link=_link(dice, moment),
        retry=dice.random() < 0.15,
        cancel=dice.random() < 0.1,
    )


def _drawn(dice: random.Random, weights: Mapping[T, int]) -> T:
    return dice.choices(list(weights), list(weights.values()))[0]


def _delay(dice: random.Random, moment: Moment) -> float:
    """Draw the delay between the start of a phase and the fault, in seconds.

    The delay is shorter than the phase, so that the fault strikes during the phase.
    """
    longest = {Moment.PREFLIGHT: 0.5, Moment.FIRST: 0.8, Moment.SWITCHOVER: 0.6}
    return round(dice.choice((0.0, dice.uniform(0.0, longest.get(moment, 0.0)))), 2)


def _mode(dice: random.Random, moment: Moment) -> str:
    if moment is Moment.POST_COPY:
        return "postcopy"
    if moment in (Moment.LATE, Moment.SWITCHOVER):
        return "precopy"
    modes = ["precopy", "precopy", "hybrid"]
    if moment is not Moment.FIRST:  # in stop-and-copy, the guest is paused in every pass
        modes.append("stop-and-copy")
    return dice.choice(modes)


def _max_downtime(moment: Moment) -> str:
    if moment is Moment.LATE:
        return "100ms"
    return "10s" if moment is Moment.SWITCHOVER else "300ms"


def _link(dice: random.Random, moment: Moment) -> str | None:
    if moment is Moment.LATE:
        return "200mbit"
    if moment is Moment.SWITCHOVER:
        return "300mbit"
    if moment in (Moment.FIRST, Moment.POST_COPY):
        return dice.choice(("200mbit", "300mbit", "400mbit"))
    return dice.choice((None, None, "1gbit"))


def policy(operation: Operation) -> str:
    """Return the policy file of an operation."""
    retry = "retry\nretries: {times: 1, first_wait: 1s}" if operation.retry else "stop"
    switches = operation.mode in ("postcopy", "hybrid")
    broken = "on_postcopy_broken: recover for 20s, then ask\n" if switches else ""
    rules = "converge: {rules: [{when: {iteration: 2}, do: start_postcopy}]}\n"
    broken += rules if operation.mode == "hybrid" else ""
    return (
        f"version: vmckpt/v1\nname: chaos\nmode: {operation.mode}\n"
        f"limits: {{max_downtime: {operation.max_downtime}, time: 60s}}\non_failure: {retry}\n"
        f"{broken}transport: {{tls: off}}\nforecast: {{probe: off}}\n"
    )


def target(hosts: Sequence[str], source: str, further: int) -> str:
    """Return the host at distance `further` from the source, cyclically."""
    return hosts[(hosts.index(source) + further) % len(hosts)]


_FATAL_ON_SOURCE = (Fault.SOURCE_QEMU, Fault.SOURCE_OFF)
_FATAL_ON_TARGET = (Fault.TARGET_QEMU, Fault.TARGET_OFF)
_BEFORE = (Moment.PREFLIGHT, Moment.SETUP, Moment.FIRST, Moment.LATE)


def ends(operation: Operation, *, hit: bool) -> Ends:
    """Return how an operation may end. `hit`: whether the fault struck in its phase.

    If it did, the guest's host at that time is known, so fewer ends are possible.
    """
    early = hit and operation.moment in _BEFORE
    if operation.fault in _FATAL_ON_SOURCE:
        return Ends.GONE if early and not operation.delay else Ends.LIVES_OR_GONE
    if operation.fault in _FATAL_ON_TARGET:
        return Ends.LIVES if early else Ends.LIVES_OR_GONE
    return Ends.LIVES
