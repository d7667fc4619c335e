"""The state of the model: two hosts, a lease store, and the messages between them.

Times are ages in ticks, up to OLD. A guest's execution is divided into moments: moment n lasts from
the capture of epoch n - 1 to the capture of epoch n. `heard` is the last moment whose output was
released.
"""

from typing import Any, NamedTuple

from bench.model.replay import NEVER, NONE, Task
from vmckpt.lease.terms import LeaseTerms
from vmckpt.units import Seconds

TERMS = LeaseTerms(ttl=Seconds(4.0), margin=Seconds(1.0))
"""In ticks of a second: a guest runs for 3 s after its renewal was sent, a takeover waits 5 s."""
OLD = round(TERMS.ttl + TERMS.margin) + 1
ALPHA, BETA = "alpha", "beta"
RUNS, PAUSED, DEAD = "runs", "paused", "dead"
WAITS, GONE = "waits", "gone"


class Lease(NamedTuple):
    """The row in the lease store."""

    state: str = "free"
    token: int = 1
    holder: str = ""
    claim: str = ""
    age: int = 0
    """Ticks since the last renewal, or since the store's last crash, by the store's clock."""
    timeline: str = "1"
    """PostgreSQL's timeline when the token was created, or confirmed by its holder."""


class Agent(NamedTuple):
    """The memory of the agent on alpha: its tenure, and the position of its main thread."""

    token: int
    lost: bool = False
    acquired: bool = False
    renewed: int = NEVER
    timeline: str = ""
    """PostgreSQL's timeline in the answer to the last renewal."""
    changing: bool = False
    validated: bool = False
    lock: str = ""
    """The thread that holds the tokens' lock."""
    at: str = "enter"
    """The next entry of the main thread."""
    fields: tuple[Any, ...] = ()
    """The state that the Primary keeps between two of its methods."""
    main: Task | None = None
    keep: Task | None = None
    life: int = 0


class Alpha(NamedTuple):
    """The primary's host."""

    guest: str = RUNS
    moment: int = 1
    heard: int = 1
    filters: str = ""
    """all: output is buffered; part: a card lost its filters; else: output is sent at once."""
    woken: bool = False
    """Whether another program resumed the guest during a pause."""
    mirrors: bool = False
    timer: int | None = None
    """Ticks until the kernel kills QEMU."""
    page: int = NONE
    """The renewal in the watchdog's page."""
    watchdog: bool = True
    token: int = 0
    """The token in its file; 0: there is no file."""
    files: frozenset[str] = frozenset()
    """Markers in the session's directory."""
    wish: str = ""
    agent: Agent | None = Agent(token=0)
    lives: int = 0
    """Number of agents so far, modulo 3: each agent uses new names for its requests."""
    order: Task | None = None
    shut: bool = False
    """Whether the session's directory is removed, so that the protection has ended here."""


class Beta(NamedTuple):
    """The standby's host."""

    guest: str = WAITS
    agent: bool = True
    epoch: int = 0
    """The last committed epoch; 0: none."""
    moment: int = 0
    final: bool = False
    handed: bool = False
    token: int = 1
    seen: int = 0
    """1: the last renewal that the backup has seen is the newest."""
    since: int = 0
    task: Task | None = None
    ours: bool = False
    """Whether the backup has decided to take over."""


class Link(NamedTuple):
    """The connection between the agents."""

    open: bool = False
    up: tuple[tuple[Any, ...], ...] = ()
    """Messages from alpha to beta, oldest first."""
    down: tuple[tuple[Any, ...], ...] = ()


class Budget(NamedTuple):
    """How many more faults of each kind may occur."""

    agents: int = 1
    """Kills of alpha's agent."""
    watchdogs: int = 1
    backups: int = 1
    """Kills of beta's agent."""
    crashes: int = 1
    """Crashes of alpha or of the lease store."""
    cuts: int = 1
    silences: int = 1
    drifts: int = 1
    orders: int = 1
    resumes: int = 1
    cards: int = 1
    promotions: int = 1
    """Failovers of the lease store to a replica, which may lack the last change."""
    moments: int = 3
    """Maximum number of epochs."""


class World(NamedTuple):
    """The complete state."""

    alpha: Alpha = Alpha()
    beta: Beta = Beta()
    lease: Lease = Lease()
    timeline: str = "1"
    """PostgreSQL's current timeline."""
    behind: Lease | None = None
    """The row on a replica that lacks the last change, while the replica may be promoted."""
    link: Link = Link()
    late: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Requests to the lease store whose sender has given up, and which may still arrive."""
    budget: Budget = Budget()


def older(age: int) -> int:
    """Return an age one tick later."""
    return age if age in (NEVER, NONE) else min(age + 1, OLD)


def aged(task: Task | None) -> Task | None:
    """Return a task one tick later: the ages among its answers grow."""
    if task is None or not any(kind == "age" for kind, _ in task.answers):
        return task
    answers = tuple(
        (kind, older(value)) if kind == "age" else (kind, value) for kind, value in task.answers
    )
    return task._replace(answers=answers)


def heard(alpha: Alpha) -> int:
    """Return the last moment whose output was released on alpha."""
    return alpha.heard if alpha.filters else max(alpha.heard, alpha.moment)
