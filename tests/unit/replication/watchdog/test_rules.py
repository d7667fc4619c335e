"""A watchdog's decisions over time, with agents that take long and a libvirt that may be silent."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from vmckpt.replication.watchdog import rules
from vmckpt.replication.watchdog.rules import (
    TURN,
    End,
    KillAgent,
    KillGuest,
    KillMethod,
    KillPartner,
    ResumeGuest,
    Rules,
    SpareSeen,
    StartAgent,
    TakeOver,
    Wait,
    WatchdogFacts,
)

RULES = Rules()
MOST = 2.0
"""Seconds that a guest may be paused for an epoch, whatever becomes of the agent."""
BEGIN = 1000.0


@dataclass(kw_only=True)
class Agent:
    """One that starts, comes to work after a while and beats."""

    since: float
    starts: float
    """Seconds until it comes to work, and what it found paused is resumed."""
    came: bool = False
    stopped: bool = False
    """SIGSTOP."""

    def at_work(self, now: float) -> bool:
        return not self.stopped and now >= self.since + self.starts


@dataclass(kw_only=True)
class Scene:
    """A host, turn after turn."""

    starts: float = 0.2
    """Seconds that a new agent takes to come to work."""
    resumes: float = 0.3
    """Seconds that it takes to resume the guest."""
    silent: float = 0.0
    """For this long libvirt does not answer, and what resumes the guest fails."""
    dies: bool = False
    """New agents end after a moment."""
    now: float = BEGIN
    agent: Agent | None = None
    paused: float = 0.0
    resuming: float | None = None
    resumed: float | None = None
    started: float | None = None
    agent_since: float = BEGIN - 100
    came: float = BEGIN - 100
    spoke: float = BEGIN
    renewed: float = 0.0
    alive: bool = True
    did: list[tuple[float, rules.Action]] = field(default_factory=list)
    longest: float = 0.0
    resumable: bool = True

    def __post_init__(self) -> None:
        self.agent = Agent(since=BEGIN - 100, starts=0.0, came=True)

    def dies_in_a_pause(self) -> None:
        """The agent is killed right after it has paused the guest."""
        self.paused, self.agent = self.now, None

    def run(self, lasts: float) -> None:
        end = self.now + lasts
        while self.now < end and self.alive:
            self._live()
            action = rules.decide(self._seen(), self.now, RULES)
            if not isinstance(action, Wait):
                self.did.append((self.now, action))
            self._do(action)
            if self.paused:
                self.longest = max(self.longest, self.now - self.paused)
            self.now += TURN

    def count(self, kind: type) -> int:
        return sum(isinstance(action, kind) for _, action in self.did)

    def when(self, kind: type) -> Iterator[float]:
        return (at - BEGIN for at, action in self.did if isinstance(action, kind))

    def _live(self) -> None:
        agent = self.agent
        if self.resuming is not None and self.now >= self.resuming + self.resumes:
            self.resuming = None
            if self.now >= BEGIN + self.silent:
                self.paused = 0.0
        if agent is None:
            return
        if self.dies and agent.since >= BEGIN and self.now >= agent.since + 0.1:
            self.agent = None
        elif agent.at_work(self.now):
            if not agent.came:
                agent.came, self.came = True, self.now
            if self.now >= BEGIN + self.silent and agent.since >= BEGIN:
                self.paused = 0.0  # it undoes what it found
            if agent.came and self.now >= self.came + 0.2:
                self.spoke = self.now

    def _seen(self) -> WatchdogFacts:
        return WatchdogFacts(
            guest_lives=True, gone=0.0, over=False, renewed=self.renewed, lasts=4.0,
            stopped=self.paused, agent_lives=self.agent is not None,
            agent_since=self.agent_since, came=self.came, spoke=self.spoke, started=self.started,
            woke=BEGIN - 100, resumable=self.resumable, resuming=self.resuming is not None,
            resumed=self.resumed,
        )  # fmt: skip

    def _do(self, action: rules.Action) -> None:
        match action:
            case StartAgent():
                self.agent = Agent(since=self.now, starts=self.starts)
                self.started = self.agent_since = self.now
                self.came = 0.0
            case KillAgent():
                self.agent = None
            case ResumeGuest():
                self.resuming = self.resumed = self.now
            case KillGuest():
                self.alive = False
            case Wait() | End():
                pass


@pytest.mark.parametrize("starts", [0.2, 4.0, 8.0, 20.0, 50.0])
def test_an_agent_that_dies_in_a_pause_costs_a_moment_however_long_the_next_one_starts(
    starts: float,
) -> None:
    """On a host with a load of 16 on 2 cores each agent took more than 5 s to start. The watchdog
    killed three in a row for it, and the guest was paused for 18 s."""
    scene = Scene(starts=starts)
    scene.dies_in_a_pause()
    scene.run(starts + 30)

    assert scene.longest < MOST
    assert (scene.count(KillAgent), scene.count(StartAgent), scene.count(ResumeGuest)) == (0, 1, 1)
    assert scene.agent is not None
    assert scene.agent.came


def test_an_agent_that_hangs_in_a_pause_is_ended_and_the_guest_resumed_at_once() -> None:
    scene = Scene(starts=10.0)
    assert scene.agent is not None
    scene.paused, scene.agent.stopped = BEGIN, True
    scene.run(30)

    assert scene.longest < MOST
    assert [type(action) for _, action in scene.did] == [KillAgent, ResumeGuest, StartAgent]


def test_a_libvirt_that_does_not_answer_is_asked_again_and_no_agent_is_killed_for_it() -> None:
    scene = Scene(starts=20.0, silent=6.0)
    scene.dies_in_a_pause()
    scene.run(40)

    assert scene.count(KillAgent) == 0
    assert scene.count(StartAgent) == 1
    assert scene.longest < 6.0 + 1.0 + 2 * scene.resumes + 2 * TURN
    asked = list(scene.when(ResumeGuest))
    assert all(1.0 <= b - a < 1.5 for a, b in pairwise(asked))


def test_agents_that_end_at_once_are_started_once_a_second_and_the_guest_runs() -> None:
    scene = Scene(dies=True)
    scene.dies_in_a_pause()
    scene.run(10)

    assert scene.longest < MOST
    assert scene.count(ResumeGuest) == 1
    assert 9 <= scene.count(StartAgent) <= 10


def test_an_agent_that_never_comes_is_given_a_minute() -> None:
    scene = Scene(starts=1e6)
    scene.agent = None
    scene.run(130)

    assert [round(at) for at in scene.when(KillAgent)] == [60, 120]


def test_an_agent_that_came_and_does_not_undo_the_pause_is_ended_after_its_grace() -> None:
    """It holds the lock of the process that works with the guest, so only it can resume it."""
    scene = Scene(starts=1.0, silent=1e6, resumes=1e6)
    scene.dies_in_a_pause()
    scene.resuming = scene.resumed = BEGIN  # which hangs
    scene.run(1)
    scene.resuming = None
    scene.run(8)

    assert [round(at, 1) for at in scene.when(KillAgent)] == pytest.approx([2.1 + RULES.grace], 0.1)


def test_the_lease_ends_the_guest_whatever_is_under_way() -> None:
    scene = Scene(starts=1e6, silent=1e6)
    scene.dies_in_a_pause()
    scene.renewed = BEGIN - 1
    scene.run(10)

    assert not scene.alive
    assert [round(at, 1) for at in scene.when(KillGuest)] == [3.0]


def test_a_standby_is_never_resumed() -> None:
    scene = Scene(resumable=False)
    scene.dies_in_a_pause()
    scene.run(3)

    assert scene.count(ResumeGuest) == 0


@pytest.mark.parametrize(
    ("timer", "systemd", "kept_by"),
    [
        (True, True, KillMethod.KERNEL),
        (True, False, KillMethod.KERNEL),
        (False, True, KillMethod.UNIT),
        (False, False, KillMethod.PAIR),
    ],
)
def test_what_enforces_a_lease_follows_from_what_the_host_has(
    timer: bool, systemd: bool, kept_by: KillMethod
) -> None:
    assert rules.kill_method(timer=timer, systemd=systemd) is kept_by


SPARE = SpareSeen(
    guest_lives=True, over=False, renewed=BEGIN - 1, lasts=4.0, partner_lives=True,
    looked=BEGIN - 0.05, woke=BEGIN - 100,
)  # fmt: skip


def spare_seen(**more: float) -> SpareSeen:
    told = {name: getattr(SPARE, name) for name in SPARE.__slots__}
    return SpareSeen(**{**told, **more})


@pytest.mark.parametrize(
    ("seen", "action"),
    [
        pytest.param({}, Wait, id="all is well"),
        pytest.param({"over": True, "partner_lives": False}, End, id="over"),
        pytest.param({"partner_lives": False}, TakeOver, id="its partner is gone"),
        pytest.param({"looked": BEGIN - 1.1}, KillPartner, id="hangs"),
        pytest.param({"looked": BEGIN - 0.9}, Wait, id="was held up"),
        pytest.param({"looked": BEGIN - 9, "woke": BEGIN - 0.5}, Wait, id="as we were"),
        pytest.param({"renewed": BEGIN - 4.01}, KillGuest, id="the lease has ended"),
        pytest.param({"renewed": BEGIN - 9, "partner_lives": False}, KillGuest, id="both"),
        pytest.param({"renewed": BEGIN - 9, "looked": BEGIN - 9}, KillGuest, id="and hangs"),
        pytest.param({"renewed": float("-inf")}, KillGuest, id="lost"),
        pytest.param({"renewed": float("nan")}, KillGuest, id="no number"),
        pytest.param({"renewed": BEGIN - 9, "guest_lives": False}, Wait, id="it did end it"),
        pytest.param({"guest_lives": False, "partner_lives": False}, TakeOver, id="word is left"),
    ],
)
def test_the_spare_watchdog_chooses(seen: dict[str, float], action: type) -> None:
    assert isinstance(rules.stand_by(spare_seen(**seen), BEGIN), action)
