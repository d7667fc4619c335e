"""How a migration by epochs ends: on the source or on the target, and never on both."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.moves import ALPHA, BETA, PAIR, SESSION, UUID, Hosts
from vmckpt.errors import OutcomeUnknown, RemoteError
from vmckpt.journal.recorder import OrphanedJob
from vmckpt.journal.records import StepState, StoredStep
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.protection import agent_client
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer
from vmckpt.protection.migration import finish as migration_finish
from vmckpt.protection.migration import recovery
from vmckpt.protection.steps import Step
from vmckpt.units import Seconds


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    made = Hosts()
    monkeypatch.setattr(agent_client, "order", made.order)
    monkeypatch.setattr(agent_client, "status", made.status)
    monkeypatch.setattr(migration_finish, "_TURN", 0.001)
    monkeypatch.setattr(migration_finish, "_ARRIVES", Seconds(0.05))
    return made


def nothing(_: str) -> None:
    pass


async def test_called_off_the_source_ends_first_and_the_guest_runs_on_there(hosts: Hosts) -> None:
    said: list[str] = []
    assert await migration_finish.call_off(PAIR, said.append) is None
    assert hosts.did == ["alpha end", "beta end"]
    assert hosts.running == ["alpha"]
    assert hosts.source.defined
    assert hosts.left == []
    assert said == ["alpha: ended its mirrors", "beta: stopped the standby"]


async def test_what_was_given_away_is_not_called_off_but_finished(hosts: Hosts) -> None:
    hosts.delivers = False
    hosts.give()
    told = await migration_finish.call_off(PAIR, nothing)
    assert told is not None
    assert hosts.running == ["beta"]
    assert hosts.left == []
    assert not hosts.source.defined
    assert hosts.target.settled


async def test_finished_the_standby_is_told_what_it_may_not_have_heard(hosts: Hosts) -> None:
    hosts.delivers = False
    hosts.give()
    assert await migration_finish.finish(PAIR, nothing) is not None
    assert hosts.did == ["beta failover", "alpha end", "beta end"]
    assert hosts.running == ["beta"]


async def test_what_the_target_cannot_take_runs_on_where_it_was(hosts: Hosts) -> None:
    hosts.target.loads = False
    hosts.give()
    said: list[str] = []
    assert await migration_finish.finish(PAIR, said.append) is None
    assert hosts.running == ["alpha"]
    assert hosts.left == []
    assert hosts.source.defined
    assert said[0].startswith("beta could not run web1")


async def test_a_target_that_has_let_it_run_is_never_taken_back_from(hosts: Hosts) -> None:
    """Its QEMU died right after it: nobody knows what it has sent and written."""
    hosts.give()
    hosts.target.qemu = hosts.target.agent = False
    assert await migration_finish.finish(PAIR, nothing) is not None
    assert hosts.running == []


async def test_a_target_that_does_not_answer_leaves_it_open(hosts: Hosts) -> None:
    hosts.delivers = False
    hosts.give()
    hosts.silent = {"beta"}
    told = "web1 was handed over to beta, which does not report it as running: beta: no answer"
    with pytest.raises(OutcomeUnknown, match=told):
        await migration_finish.finish(PAIR, nothing)
    assert hosts.running == []
    hosts.silent = set()
    await migration_finish.finish(PAIR, nothing)
    assert hosts.running == ["beta"]


async def test_a_target_that_has_forgotten_it_is_not_waited_for(hosts: Hosts) -> None:
    hosts.give()
    hosts.target.role = hosts.target.ran = hosts.target.qemu = False
    with pytest.raises(OutcomeUnknown, match="the host has no record of the migration"):
        await migration_finish.finish(PAIR, nothing)


async def test_where_the_source_is_silent_the_standby_stays(hosts: Hosts) -> None:
    hosts.silent = {"alpha"}
    with pytest.raises(RemoteError):
        await migration_finish.call_off(PAIR, nothing)
    assert hosts.did == []


async def test_a_source_that_cannot_be_tidied_is_told_and_nothing_more(hosts: Hosts) -> None:
    hosts.give()
    hosts.silent = {"alpha"}
    said: list[str] = []
    assert await migration_finish.finish(PAIR, said.append) is not None
    assert hosts.running == ["beta"]
    assert "could not clean up" in said[0]


class Recorder:
    """Keeps how it ended."""

    def __init__(self) -> None:
        self.ended: list[Outcome] = []

    def finish(self, outcome: Outcome, report: object) -> None:
        del report
        self.ended.append(outcome)


def step(state: StepState = StepState.INTENDED, session: str = SESSION) -> StoredStep:
    return StoredStep(
        seq=1, name=Step.PROTECT, intent={"session": session}, state=state, result=None,
        began_at=0.0, ended_at=None,
    )  # fmt: skip


def case(recorder: Recorder | None, *steps: StoredStep) -> OrphanedJob:
    operation = SimpleNamespace(
        id="7", guest="web1", guest_uuid=UUID, source="alpha", target="beta"
    )
    inventory = SimpleNamespace(host=lambda name: {"alpha": ALPHA, "beta": BETA}[name])
    return OrphanedJob(
        inventory=cast("Any", inventory), operation=cast("Any", operation), steps=steps,
        recorder=cast("Any", recorder), caller=cast("Any", None), adopt=False,
    )  # fmt: skip


async def settled(recorder: Recorder | None = None) -> Settled:
    return await recovery.settle(case(recorder, step()), ())


async def test_only_looked_at_nothing_is_done(hosts: Hosts) -> None:
    found = await settled()
    assert (found.truth, found.outcome) == ("web1 never left alpha", Outcome.FAILED)
    assert hosts.did == []


async def test_without_its_controller_a_guest_on_its_way_stays(hosts: Hosts) -> None:
    recorder = Recorder()
    await settled(recorder)
    assert hosts.running == ["alpha"]
    assert hosts.left == []
    assert recorder.ended == [Outcome.FAILED]


async def test_without_its_controller_a_guest_that_was_given_away_arrives(hosts: Hosts) -> None:
    hosts.delivers = False
    hosts.give()
    recorder = Recorder()
    found = await settled(recorder)
    assert found.truth == "alpha has handed web1 over to beta"
    assert hosts.running == ["beta"]
    assert hosts.left == []
    assert recorder.ended == [Outcome.COMPLETED]


async def test_a_guest_that_is_given_away_between_look_and_end_arrives(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def status(host: Host, guest: str) -> ProtectionStatus:
        told = await hosts.status(host, guest)
        if hosts.asked == 2 and not hosts.source.given:
            hosts.give()
        return told

    monkeypatch.setattr(agent_client, "status", status)
    recorder = Recorder()
    found = await settled(recorder)
    assert found.truth == "web1 is running on beta"
    assert hosts.running == ["beta"]
    assert recorder.ended == [Outcome.COMPLETED]


async def test_what_the_target_could_not_take_is_told_so(hosts: Hosts) -> None:
    hosts.target.loads = False
    hosts.give()
    recorder = Recorder()
    found = await settled(recorder)
    assert found.truth == "beta could not run web1, which is paused on alpha"
    assert hosts.running == ["alpha"]
    assert recorder.ended == [Outcome.FAILED]


@pytest.mark.parametrize("silent", ["alpha", "beta"])
async def test_where_a_host_is_silent_nothing_is_settled(hosts: Hosts, silent: str) -> None:
    hosts.silent = {silent}
    recorder = Recorder()
    found = await settled(recorder)
    assert found.outcome is None
    assert silent in found.truth
    assert (hosts.did, recorder.ended) == ([], [])


async def test_a_guest_that_ended_meanwhile_is_told_so(hosts: Hosts) -> None:
    hosts.source.qemu = hosts.source.agent = False
    hosts.source.outcome = "died"
    recorder = Recorder()
    found = await settled(recorder)
    assert found.truth == "web1 has stopped: the guest's QEMU died"
    assert recorder.ended == [Outcome.SHUT_OFF]
    assert hosts.left == []


async def test_a_controller_that_died_before_anything_began_has_left_nothing(hosts: Hosts) -> None:
    hosts.source.role = hosts.target.role = hosts.target.qemu = False
    recorder = Recorder()
    found = await settled(recorder)
    assert found.truth == "web1 never left alpha"
    assert recorder.ended == [Outcome.FAILED]


async def test_a_controller_that_died_when_all_was_done_is_told_so(hosts: Hosts) -> None:
    hosts.give()
    await migration_finish.finish(PAIR, nothing)
    recorder = Recorder()
    found = await settled(recorder)
    assert found.truth == "web1 is running on beta"
    assert hosts.running == ["beta"]
    assert recorder.ended == [Outcome.COMPLETED]


async def test_a_standby_that_was_left_on_a_silent_target_goes_later(hosts: Hosts) -> None:
    hosts.silent = {"beta"}
    with pytest.raises(RemoteError):
        await migration_finish.call_off(PAIR, nothing)
    hosts.silent = set()
    recorder = Recorder()
    found = await settled(recorder)
    assert found.truth == "web1 never left alpha"
    assert hosts.left == []
    assert hosts.running == ["alpha"]


async def test_a_guest_that_ended_and_left_nothing_is_said_to_have_ended(hosts: Hosts) -> None:
    hosts.source.role = hosts.target.role = hosts.source.qemu = hosts.target.qemu = False
    recorder = Recorder()
    found = await settled(recorder)
    assert "is running on neither host" in found.truth
    assert recorder.ended == [Outcome.SHUT_OFF]


def test_another_session_s_agents_are_not_asked_for_this_one() -> None:
    """A protection that was begun later, in the other direction."""
    found = recovery._of(PAIR, parse_answer({"role": "backup", "session": "later", "runs": True}))
    assert found == ProtectionStatus(runs=False)


async def test_a_target_that_knows_nothing_of_what_it_was_given_is_a_person_s(hosts: Hosts) -> None:
    hosts.give()
    hosts.target.role = hosts.target.ran = hosts.target.qemu = False
    found = await settled(Recorder())
    assert found.outcome is None
    assert "has no record of the migration" in found.truth


def test_only_the_open_attempt_counts() -> None:
    done = step(StepState.UNDONE)
    assert recovery.begun([done]) is None
    later = step(session="later")
    assert recovery.begun([done, later]) is later


FLAGS = ("given", "delivered", "loads", "source agent", "target agent", "target qemu")


@pytest.mark.parametrize("flags", list(itertools.product((False, True), repeat=len(FLAGS))))
async def test_wherever_both_died_at_most_one_copy_runs_and_it_is_the_right_one(
    hosts: Hosts, flags: tuple[bool, ...]
) -> None:
    """A controller that died, and agents and a standby that may be gone, too."""
    now = dict(zip(FLAGS, flags, strict=True))
    hosts.target.loads, hosts.delivers = now["loads"], now["delivered"]
    if now["given"]:
        hosts.give()
    hosts.source.agent = now["source agent"]
    hosts.target.agent = hosts.target.agent and now["target agent"] and now["target qemu"]
    if not hosts.target.ran:
        hosts.target.qemu = hosts.target.qemu and now["target qemu"]
    before = hosts.target.ran
    recorder = Recorder()
    try:
        found = await settled(recorder)
    except OutcomeUnknown:
        # Its standby waits and nobody is there to tell: a guard starts another agent.
        assert hosts.running == []
        hosts.target.agent = True
        found = await settled(recorder)
    assert hosts.left == []
    wanted = "beta" if before or (now["given"] and hosts.target.ran) else "alpha"
    assert hosts.running == [wanted]
    assert found.outcome is (Outcome.COMPLETED if wanted == "beta" else Outcome.FAILED)
    assert hosts.source.defined is (wanted == "alpha")
