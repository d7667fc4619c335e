"""A migration by epochs from its order to its report, with agents that a test answers for."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from tests.support.builders import FACTS, GUEST
from tests.support.fake_drivers import FakeDesk
from tests.support.moves import ALPHA, BETA, COST, SESSION, UUID, Hosts
from tests.support.policies import policy
from vmckpt.errors import BadInput, LeaseLost, RemoteError, VmckptError
from vmckpt.hypervisor import domains
from vmckpt.journal.records import RequestKind, StepState
from vmckpt.migration.attempt import MigrationContext
from vmckpt.migration.epochs import attempt
from vmckpt.migration.plan.planner import Plan
from vmckpt.migration.report import MigrationReport, as_json
from vmckpt.migration.request import Setting
from vmckpt.model.events import Decided, Event, PhaseChanged, Sampled
from vmckpt.model.guest import GuestState, Presence
from vmckpt.model.migration import Driver, JobPhase, Mode, Outcome
from vmckpt.protection import agent_client
from vmckpt.protection.migration import finish
from vmckpt.protection.request import ProtectRequest
from vmckpt.units import MIB, BytesPerSecond, Seconds

POLICY = policy(
    "version: vmckpt/v1\nname: mine\nmode: checkpoint\nlimits: {max_downtime: 300ms, time: 20s}\n"
)
SLOW = [{"pause_s": 0.02, "busy_s": 1.5}] * 3


@dataclass
class Desk(FakeDesk):
    """The journal's, which can be lost."""

    lost: bool = False
    settled: list[StepState] = field(default_factory=list)

    def check(self) -> None:
        if self.lost:
            raise LeaseLost("another controller has taken over")

    async def settle(self, state: StepState) -> None:
        self.settled.append(state)


class Beginning:
    """As protection.start.Beginning; `trouble` keeps it from starting."""

    trouble: VmckptError | None = None
    asked: list[ProtectRequest]

    def __init__(
        self, setting: object, request: ProtectRequest, guest: object, *, step_log: Desk,
        looked: Mapping[str, Any], caller: object,
    ) -> None:  # fmt: skip
        del setting, guest, looked, caller
        self.session, self._step_log = SESSION, step_log
        self.asked.append(request)

    async def intend(self) -> None:
        await self._step_log.intend("protect", {"session": SESSION})

    async def start(self) -> None:
        assert self._step_log.intents == ["protect"]
        if self.trouble is not None:
            raise self.trouble


class One:
    """A move, and all around it."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.step_log = hosts, Desk(coming=[])
        self.events: list[Event] = []
        self.stop = asyncio.Event()
        self.plan = Plan(
            facts=replace(FACTS, guest=replace(GUEST, uuid=UUID)), findings=(), policy=POLICY,
            mode=Mode.CHECKPOINT,
        )  # fmt: skip

    async def move(self, **changes: Any) -> MigrationReport:
        context = {
            "setting": Setting(source=ALPHA, target=BETA, policies=(), outside=None),
            "here": cast("Any", None), "there": cast("Any", None), "remotes": None,
            "step_log": cast("Any", self.step_log), "tracer": None, "emit": self.events.append,
            "stop": self.stop, "observe": False,
        }  # fmt: skip
        return await attempt.run(self.plan, MigrationContext(**{**context, **changes}))

    def later(self, seconds: float, what: Any) -> None:
        asyncio.get_running_loop().call_later(seconds, what)

    @property
    def phases(self) -> list[JobPhase]:
        return [one.phase for one in self.events if isinstance(one, PhaseChanged)]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    made = Hosts()

    async def presence(*_: object) -> Presence:
        state = GuestState.RUNNING if made.source.qemu else GuestState.SHUT_OFF
        return Presence(reachable=True, state=state)

    monkeypatch.setattr(agent_client, "order", made.order)
    monkeypatch.setattr(agent_client, "status", made.status)
    monkeypatch.setattr(attempt, "Beginning", Beginning)
    monkeypatch.setattr(domains, "presence", presence)
    monkeypatch.setattr(finish, "_ARRIVES", Seconds(0.05))
    Beginning.trouble, Beginning.asked = None, []
    return made


@pytest.fixture
def one(hosts: Hosts) -> One:
    return One(hosts)


@pytest.mark.looptime
async def test_a_guest_whose_epochs_fit_is_switched_and_nothing_is_left(one: One) -> None:
    done = await one.move()

    assert done.outcome is Outcome.COMPLETED
    assert one.hosts.running == ["beta"]
    assert one.hosts.left == []
    assert done.driver is Driver.AGENTS
    assert done.totals is not None
    assert done.totals.downtime == pytest.approx(0.1)
    assert [(one.action, one.rule) for one in done.decisions] == [("switch", "caught up")]
    assert one.phases[0] is JobPhase.SETUP
    assert one.phases[-1] is JobPhase.DONE
    assert as_json(done)["downtime_ms"] == pytest.approx(100)
    assert one.step_log.settled == []


@pytest.mark.looptime
async def test_it_is_asked_for_what_the_policy_allows(one: One) -> None:
    limits = replace(POLICY.limits, bandwidth=BytesPerSecond(20 * MIB))
    one.plan = replace(one.plan, policy=replace(POLICY, limits=limits))
    await one.move()

    (asked,) = Beginning.asked
    assert asked.move is not None
    assert asked.move.images == {}
    assert asked.move.bandwidth == 20 * MIB
    assert asked.terms.interval == pytest.approx(0.2)
    assert not asked.automatic


@pytest.mark.looptime
async def test_it_waits_until_the_epochs_fit(one: One) -> None:
    one.hosts.source.phase, one.hosts.source.recent = "copying", []

    def copied() -> None:
        one.hosts.source.phase, one.hosts.source.recent = "protecting", SLOW

    def calmer() -> None:
        one.hosts.source.recent = [COST] * 3

    one.later(4.0, copied)
    one.later(9.0, calmer)
    done = await one.move()

    assert done.outcome is Outcome.COMPLETED
    assert 9.0 <= done.elapsed < 11.0
    samples = [event.sample for event in one.events if isinstance(event, Sampled)]
    assert {sample.iteration for sample in samples} == {2}
    assert samples[0].expected_downtime is None
    assert max(sample.expected_downtime or 0 for sample in samples) == pytest.approx(1.57)


@pytest.mark.looptime
async def test_at_the_time_limit_it_is_given_up_and_the_guest_stays(one: One) -> None:
    one.hosts.source.recent = SLOW
    done = await one.move()

    assert done.outcome is Outcome.TIMED_OUT
    assert 20.0 <= done.elapsed < 21.0
    assert one.hosts.running == ["alpha"]
    assert one.hosts.left == []
    assert one.hosts.source.defined
    assert done.error is not None
    assert "a switchover would take 1.6 s" in done.error
    assert one.step_log.settled == [StepState.UNDONE]


@pytest.mark.looptime
async def test_stopped_before_the_switch_the_guest_stays(one: One) -> None:
    one.hosts.source.recent = SLOW
    one.later(3.0, one.stop.set)
    done = await one.move()

    assert done.outcome is Outcome.CANCELLED
    assert one.hosts.did == ["alpha end", "beta end"]
    assert one.hosts.running == ["alpha"]


@pytest.mark.looptime
async def test_stopped_in_the_middle_of_the_switch_it_is_what_the_source_says(one: One) -> None:
    """It is asked to switch, and does so only after it was stopped."""
    one.hosts.switches = False

    def too_late() -> None:
        one.hosts.give()
        one.stop.set()

    one.later(2.0, too_late)
    done = await one.move()

    assert done.outcome is Outcome.COMPLETED
    assert one.hosts.running == ["beta"]
    assert one.hosts.left == []
    assert "the migration completed before it could be stopped" in done.warnings


@pytest.mark.looptime
async def test_a_switch_that_came_to_nothing_is_asked_for_again(one: One) -> None:
    one.hosts.switches = False

    def nothing_came_of_it() -> None:
        one.hosts.source.wished = False
        one.hosts.switches = True

    one.later(3.0, nothing_came_of_it)
    done = await one.move()

    assert done.outcome is Outcome.COMPLETED
    assert one.hosts.did.count("alpha planned") == 2
    assert len(done.decisions) == 1


@pytest.mark.looptime
async def test_a_source_whose_word_is_lost_has_given_it_away_all_the_same(one: One) -> None:
    one.hosts.delivers = False
    done = await one.move()

    assert done.outcome is Outcome.COMPLETED
    assert "beta failover" in one.hosts.did
    assert one.hosts.running == ["beta"]


@pytest.mark.looptime
async def test_what_the_target_cannot_take_has_failed_and_runs_on(one: One) -> None:
    one.hosts.target.loads = False
    done = await one.move()

    assert (done.outcome, done.error) == (Outcome.FAILED, "beta could not run the guest")
    assert one.hosts.running == ["alpha"]
    assert one.hosts.left == []


@pytest.mark.looptime
async def test_what_cannot_be_begun_leaves_nothing(one: One) -> None:
    Beginning.trouble = BadInput("beta: no room for the standby")
    done = await one.move()

    assert (done.outcome, done.error) == (Outcome.FAILED, "beta: no room for the standby")
    assert one.hosts.left == []
    assert one.hosts.running == ["alpha"]


@pytest.mark.looptime
async def test_a_guest_that_ends_meanwhile_is_said_to_have_ended(one: One) -> None:
    one.hosts.source.recent = SLOW

    def dies() -> None:
        one.hosts.source.qemu, one.hosts.source.outcome = False, "died"

    one.later(2.0, dies)
    done = await one.move()

    assert done.outcome is Outcome.SHUT_OFF
    assert one.hosts.left == []


@pytest.mark.looptime
async def test_a_source_that_falls_silent_for_a_while_is_waited_for(one: One) -> None:
    one.hosts.source.recent = SLOW
    one.later(1.0, lambda: one.hosts.silent.add("alpha"))
    one.later(15.0, lambda: one.hosts.silent.discard("alpha"))
    one.later(16.0, one.stop.set)
    done = await one.move()

    assert done.outcome is Outcome.CANCELLED


@pytest.mark.looptime
async def test_a_source_that_stays_silent_leaves_it_to_recovery(one: One) -> None:
    one.plan = replace(
        one.plan, policy=replace(POLICY, limits=replace(POLICY.limits, time=None))
    )  # fmt: skip
    one.hosts.source.recent = SLOW
    one.later(1.0, lambda: one.hosts.silent.add("alpha"))
    done = await one.move()

    assert done.outcome is Outcome.UNKNOWN
    assert one.hosts.did == []
    assert one.step_log.settled == []
    assert any("alpha" in warning for warning in done.warnings)


@pytest.mark.looptime
async def test_a_silent_target_keeps_nobody_from_staying(one: One) -> None:
    """The guest runs on; what is left on the target is recovery's."""
    one.hosts.source.recent = SLOW
    one.later(1.0, lambda: one.hosts.silent.add("beta"))
    one.later(1.5, one.stop.set)
    done = await one.move()

    assert done.outcome is Outcome.UNKNOWN
    assert one.hosts.running == ["alpha"]
    assert one.hosts.did == ["alpha end"]


@pytest.mark.looptime
async def test_another_terminal_cancels_and_sets_the_downtime_and_nothing_else(one: One) -> None:
    one.hosts.source.recent = SLOW
    one.step_log.coming = [
        (1.0, RequestKind.PAUSE, {}), (1.0, RequestKind.POSTCOPY, {}),
        (1.0, RequestKind.BANDWIDTH, {"bytes_per_second": MIB}),
        (2.0, RequestKind.MAX_DOWNTIME, {"seconds": 2.0}),
    ]  # fmt: skip
    done = await one.move()

    assert done.outcome is Outcome.COMPLETED
    told = {kind: (ok, text) for kind, ok, text in one.step_log.answers}
    assert told["pause"] == (False, "not available in mode checkpoint")
    assert told["bandwidth"] == (False, "not available in mode checkpoint")
    assert told["postcopy"][0] is False
    begins = "the last epoch begins when it is expected to take at most 2 s"
    assert told["max-downtime"] == (True, begins)


@pytest.mark.looptime
async def test_cancelled_from_another_terminal_it_ends_as_by_ctrl_c(one: One) -> None:
    one.hosts.source.recent = SLOW
    one.step_log.coming = [(1.0, RequestKind.CANCEL, {})]
    done = await one.move()

    assert done.outcome is Outcome.CANCELLED
    assert ("cancel", True, "cancelling") in one.step_log.answers


@pytest.mark.looptime
async def test_who_is_replaced_touches_nothing_any_more(one: One) -> None:
    one.later(0.0, lambda: setattr(one.step_log, "lost", True))
    with pytest.raises(LeaseLost):
        await one.move()
    assert one.hosts.did == []


@pytest.mark.looptime
async def test_a_command_that_is_cut_short_puts_back_what_it_can(one: One) -> None:
    one.hosts.source.recent = SLOW
    task = asyncio.create_task(one.move())
    one.later(2.0, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert one.hosts.running == ["alpha"]
    assert one.hosts.left == []


@pytest.mark.looptime
@pytest.mark.parametrize("changes", [{"observe": True}, {"tracer": cast("Any", object())}])
async def test_what_is_qemus_own_is_refused(one: One, changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="not supported in mode checkpoint"):
        await one.move(**changes)
    assert one.hosts.asked == 0


@pytest.mark.looptime
async def test_a_decision_is_told_when_it_is_made(one: One) -> None:
    await one.move()
    (told,) = [event.decision for event in one.events if isinstance(event, Decided)]

    assert told.reason == "the final epoch is expected to take 120 ms; the limit is 300 ms"


@pytest.mark.looptime
async def test_a_host_that_cannot_be_asked_at_all_ends_it_before_it_begins(
    one: One, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object, **__: object) -> dict[str, Any]:
        raise RemoteError("alpha: no answer")

    monkeypatch.setattr(agent_client, "order", fails)
    with pytest.raises(RemoteError):
        await one.move()
    assert one.step_log.intents == []
