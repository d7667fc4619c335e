"""The state of the model: two hosts, a lease store, and what is on its way between them.

Times are ages in ticks, up to OLD. A guest's history is counted in moments: it is in moment n from
the capture of epoch n - 1 to its own. `heard` is the last moment of which output got out.
"""

from typing import Any, NamedTuple

from bench.model.replay import NEVER, NONE, Task
from vmckpt.lease.terms import LeaseTerms
from vmckpt.units import Seconds

TERMS = LeaseTerms(ttl=Seconds(4.0), margin=Seconds(1.0))
"""In ticks of a second: a guest runs for 3 after its renewal was sent, a takeover waits for 5."""
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
    """Since the last renewal, or the store's last crash, by the store's clock."""
    timeline: str = "1"
    """PostgreSQL's, when the token was made, or confirmed by its holder."""


class Agent(NamedTuple):
    """The memory of the agent on alpha: its tenure, and where its main thread is."""

    token: int
    lost: bool = False
    acquired: bool = False
    renewed: int = NEVER
    timeline: str = ""
    """PostgreSQL's, as the last renewal was told."""
    changing: bool = False
    validated: bool = False
    lock: str = ""
    """The thread that holds the tokens' lock."""
    at: str = "enter"
    """What the main thread does next."""
    fields: tuple[Any, ...] = ()
    """The Primary's own, between two of its methods."""
    main: Task | None = None
    keep: Task | None = None
    life: int = 0


class Alpha(NamedTuple):
    """The primary's host."""

    guest: str = RUNS
    moment: int = 1
    heard: int = 1
    filters: str = ""
    """all: output is held; part: a card lost its filters; else: output gets out at once."""
    woken: bool = False
    """Another program resumed the guest in the middle of a pause."""
    mirrors: bool = False
    timer: int | None = None
    """Ticks until the kernel kills QEMU."""
    page: int = NONE
    """The renewal in the watchdog's page."""
    watchdog: bool = True
    token: int = 0
    """The token's file; 0: there is none."""
    files: frozenset[str] = frozenset()
    """Markers in the session's directory."""
    wish: str = ""
    agent: Agent | None = Agent(token=0)
    lives: int = 0
    """Of agents, modulo 3: each names its questions to the lease store anew."""
    order: Task | None = None
    shut: bool = False
    """The session's directory is removed: the protection is over here."""


class Beta(NamedTuple):
    """The standby's host."""

    guest: str = WAITS
    agent: bool = True
    epoch: int = 0
    """The last committed; 0: none."""
    moment: int = 0
    final: bool = False
    handed: bool = False
    token: int = 1
    seen: int = 0
    """1: the renewal that was seen last is the lease's newest."""
    since: int = 0
    task: Task | None = None
    ours: bool = False
    """It was decided that the guest runs here."""


class Link(NamedTuple):
    """The connection between the agents."""

    open: bool = False
    up: tuple[tuple[Any, ...], ...] = ()
    """From alpha to beta, oldest first."""
    down: tuple[tuple[Any, ...], ...] = ()


class Budget(NamedTuple):
    """How much more may go wrong."""

    agents: int = 1
    """Kills of alpha's agent."""
    watchdogs: int = 1
    backups: int = 1
    """Kills of beta's agent."""
    crashes: int = 1
    """Of alpha, or of the lease store."""
    cuts: int = 1
    silences: int = 1
    drifts: int = 1
    orders: int = 1
    resumes: int = 1
    cards: int = 1
    promotions: int = 1
    """Failovers of the lease store to a replica, which may lack the last change."""
    moments: int = 3
    """So many epochs are captured."""


class World(NamedTuple):
    """All of it."""

    alpha: Alpha = Alpha()
    beta: Beta = Beta()
    lease: Lease = Lease()
    timeline: str = "1"
    """PostgreSQL's."""
    behind: Lease | None = None
    """The row on a replica that lacks the last change, as long as one may be promoted."""
    link: Link = Link()
    late: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Questions to the lease store whose sender has given up, and which may arrive yet."""
    budget: Budget = Budget()


def older(age: int) -> int:
    """An age one tick later."""
    return age if age in (NEVER, NONE) else min(age + 1, OLD)


def aged(task: Task | None) -> Task | None:
    """The same, for clock readings among a task's answers."""
    if task is None or not any(kind == "age" for kind, _ in task.answers):
        return task
    answers = tuple(
        (kind, older(value)) if kind == "age" else (kind, value) for kind, value in task.answers
    )
    return task._replace(answers=answers)


def heard(alpha: Alpha) -> int:
    """The last moment of which output got out of alpha."""
    return alpha.heard if alpha.filters else max(alpha.heard, alpha.moment)
