"""Draw a round of the fault campaign from its seed. Pure."""

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from itertools import combinations
from typing import Any


class Way(StrEnum):
    """The part of a protection's life in which a step occurs."""

    BEGINNING = "beginning"
    EPOCH = "epoch"
    ALONE = "alone"
    """The primary no longer reaches the backup, and runs unprotected."""
    TAKEOVER = "takeover"
    """The primary is killed, and the standby takes over."""
    SWITCH = "switch"
    ENDING = "ending"
    SNAPSHOT = "snapshot"
    """The guest is not protected; a snapshot is taken."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step occurs."""

    way: Way
    backup: bool = False
    """True: on the backup. False: on the guest's host."""
    order: bool = False
    """True: in the process that executes an order. False: in the permanent agent."""


STEPS: Mapping[str, Place] = {
    "begun": Place(Way.BEGINNING),
    "first copy": Place(Way.BEGINNING),
    "lease armed": Place(Way.BEGINNING),
    "standby valid": Place(Way.BEGINNING),
    "idle": Place(Way.EPOCH),
    "paused": Place(Way.EPOCH),
    "output closed": Place(Way.EPOCH),
    "captured": Place(Way.EPOCH),
    "sending": Place(Way.EPOCH),
    "sent": Place(Way.EPOCH),
    "acknowledged": Place(Way.EPOCH),
    "releasing": Place(Way.EPOCH),
    "released": Place(Way.EPOCH),
    "committed": Place(Way.EPOCH, backup=True),
    "applying": Place(Way.EPOCH, backup=True),
    "standby invalid": Place(Way.ALONE),
    "taking over": Place(Way.TAKEOVER, backup=True),
    "taken over": Place(Way.TAKEOVER, backup=True),
    "loaded": Place(Way.TAKEOVER, backup=True),
    "runs": Place(Way.TAKEOVER, backup=True),
    "switching": Place(Way.SWITCH),
    "handed over": Place(Way.SWITCH),
    "standby ending": Place(Way.ENDING, backup=True, order=True),
    "ending": Place(Way.ENDING, order=True),
    "output let out": Place(Way.ENDING, order=True),
    "capturing": Place(Way.SNAPSHOT, order=True),
}
"""The steps, by their names in bench/points.py."""


class Victim(StrEnum):
    """A process that a fault can strike."""

    AGENT = "agent"
    WATCHDOG = "watchdog"
    LIBVIRTD = "libvirtd"
    UNDO = "undo process"
    """Runs during the capture of a snapshot; a protection has no such process."""
    DISK_LOG = "disk log"
    """Receives the disk writes of a protected guest."""


def there(step: str) -> tuple[Victim, ...]:
    """Return the kinds of processes that exist at a step."""
    place = STEPS[step]
    if place.way is Way.SNAPSHOT:
        return Victim.AGENT, Victim.LIBVIRTD, Victim.UNDO
    if place.backup:
        return Victim.AGENT, Victim.WATCHDOG, Victim.LIBVIRTD
    return Victim.AGENT, Victim.WATCHDOG, Victim.LIBVIRTD, Victim.DISK_LOG


def subsets(step: str) -> list[frozenset[Victim]]:
    """Return all nonempty sets of the processes that exist at a step."""
    found = there(step)
    return [
        frozenset(some) for count in range(1, len(found) + 1) for some in combinations(found, count)
    ]


class How(StrEnum):
    """The signal that the victims receive."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP for a while"
    STOP_FOR_GOOD = "SIGSTOP"


class Kind(StrEnum):
    """A kind of fault."""

    SIGNALS = "signals"
    ONE_WAY = "one-way"
    CLOCK = "clock"
    LOST_COMMIT = "lost-commit"
    CARD = "card"
    HOST = "host"


_OFTEN: Mapping[Kind, int] = {
    Kind.SIGNALS: 58,
    Kind.ONE_WAY: 14,
    Kind.LOST_COMMIT: 10,
    Kind.CARD: 6,
    Kind.CLOCK: 6,
    Kind.HOST: 6,
}
LINKS = (
    ("primary", "backup"), ("backup", "primary"), ("primary", "witness"), ("witness", "primary"),
    ("backup", "witness"), ("witness", "backup"),
)  # fmt: skip
"""Sender and receiver of the packets that are dropped; packets in the other direction arrive."""
HOST_INJURIES = ("power", "cables", "frozen", "QEMU killed")
CLOCKS = ("lease store", "primary", "backup")
ENDS = ("QEMU killed", "agent and watchdog killed")
"""How the primary is killed, so that its standby takes over."""
_COMMITS = (
    "standby valid", "standby invalid", "handed over", "taken over", "output let out", "idle",
)  # fmt: skip
"""Steps right after a change in the lease store, and one step without a change."""
_EPOCHS = tuple(name for name, place in STEPS.items() if place.way is Way.EPOCH)
_HOUR = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A fault at a step."""

    seed: int
    kind: Kind
    step: str
    victims: tuple[Victim, ...] = ()
    how: How | None = None
    seconds: float = 0.0
    """Duration of the fault; 0: until all faults are repaired."""
    link: tuple[str, str] | None = None
    clock: str | None = None
    jump: int = 0
    plugs: bool | None = None
    """True: a network card is plugged in. False: a network card is unplugged."""
    injury: str | None = None
    end: str = ENDS[0]
    delay: float = 0.0
    """Seconds from a ready protection to the arming of the step."""

    @property
    def place(self) -> Place:
        return STEPS[self.step]

    def as_json(self) -> dict[str, Any]:
        """Return the round without fields that do not apply."""
        empty = (None, (), "", 0)
        told = {
            key: one for key, one in asdict(self).items()
            if (key in ("seed", "plugs") and one is not None) or one not in empty
        }  # fmt: skip
        if self.place.way is not Way.TAKEOVER:
            told.pop("end")
        return told

    def __str__(self) -> str:
        what = {
            Kind.SIGNALS: f"{self.how} to {', '.join(self.victims)}",
            Kind.ONE_WAY: f"nothing from {self.link and self.link[0]} reaches its"
            f" {self.link and self.link[1]}",
            Kind.CLOCK: f"the clock of the {self.clock} jumps by {self.jump} s",
            Kind.LOST_COMMIT: "the lease store fails over and loses its last commits",
            Kind.CARD: f"a network card is {'plugged in' if self.plugs else 'unplugged'}",
            Kind.HOST: f"{self.injury}",
        }[self.kind]
        lasts = f" for {self.seconds:g} s" if self.seconds else ""
        return f"{self.seed}: {what}{lasts}, at {self.step!r}"


def round_of(seed: int, only: Kind | None = None) -> Round:
    """Return the round of a seed. `only`: the kind of fault; None: drawn."""
    dice = random.Random(f"faults {seed}")
    drawn = dice.choices(list(_OFTEN), list(_OFTEN.values()))[0]
    kind = only or drawn
    delay, end = round(dice.uniform(0.0, 0.4), 2), dice.choice(ENDS)
    made = partial(Round, seed=seed, kind=kind, delay=delay, end=end)
    if kind is Kind.SIGNALS:
        # The only step with an undo process is drawn three times as often.
        step = dice.choice([*STEPS, "capturing", "capturing"])
        how = dice.choice(list(How))
        victims = tuple(sorted(dice.choice(subsets(step))))
        lasts = round(dice.choice((0.5, 2.0, 6.0)) * dice.uniform(0.8, 1.2), 1)
        seconds = lasts if how is How.STOP else 0.0
        return made(step=step, victims=victims, how=how, seconds=seconds)
    if kind is Kind.ONE_WAY:
        step = dice.choice([one for one, place in STEPS.items() if place.way is not Way.SNAPSHOT])
        seconds = dice.choice((1.0, 3.0, 0.0))
        return made(step=step, link=dice.choice(LINKS), seconds=seconds)
    if kind is Kind.LOST_COMMIT:
        # A lost commit matters most if the primary cannot repeat it.
        struck = dice.choice(((), (Victim.AGENT, Victim.WATCHDOG)))
        kills = How.KILL if struck else None
        return made(step=dice.choice(_COMMITS), victims=struck, how=kills)
    if kind is Kind.CARD:
        return made(step=dice.choice(_EPOCHS), plugs=dice.random() < 0.6)
    if kind is Kind.CLOCK:
        step = dice.choice((*_EPOCHS, "taking over", "standby invalid"))
        jump = dice.choice((_HOUR, -_HOUR))
        return made(step=step, clock=dice.choice(CLOCKS), jump=jump)
    return made(step=dice.choice(_EPOCHS), injury=dice.choice(HOST_INJURIES))
