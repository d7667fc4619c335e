"""Going on with a migration whose controller died, and stopping when another has taken over."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.engine_runs import ENDS_A_PART, HYBRID, ORDER, after_the_switch, run, terms, told
from tests.support.fake_drivers import GONE, MOVING, ON_PART, RUNS, FakeDesk, FakeHosts, FakeMover
from tests.support.simulated import Machine, Writer
from vmckpt.errors import HypervisorError, JournalError, LeaseLost
from vmckpt.journal.records import Request, RequestKind
from vmckpt.migration.run.decide import RunTerms
from vmckpt.migration.run.engine import Ending, Migration
from vmckpt.model.migration import MigrationDriver, Mode, MoveOrder, Outcome
from vmckpt.units import MIB

pytestmark = pytest.mark.looptime(end=3000)

RULE = "{name: now, when: {iteration: 2}, do: start_postcopy}"
UNDER = terms(RULE, mode=Mode.HYBRID)


def hosts(**how: Any) -> FakeHosts:
    writer = Writer(region=512 * MIB, rate=150 * MIB)
    return FakeHosts(machine=Machine(memory=1024 * MIB, setup=0.5, writers=[writer]), **how)


async def adopted(migrations: MigrationDriver, under: RunTerms, order: MoveOrder) -> Ending:
    return await Migration(migrations, under, lambda _event: None, asyncio.Event()).adopt(order)


async def test_a_migration_that_still_runs_is_watched_to_its_end() -> None:
    migrations = FakeMover(presences=[(MOVING, GONE)] * 20 + [(GONE, RUNS)])
    ending = await adopted(migrations, terms(), ORDER)

    assert ending.outcome is Outcome.COMPLETED
    assert ending.elapsed > 3.0
    assert migrations.calls == ["forget source"]


async def test_an_adopted_migration_that_fails_leaves_the_guest_where_it_was() -> None:
    migrations = FakeMover(presences=[(MOVING, GONE)] * 5 + [(RUNS, GONE)])
    ending = await adopted(migrations, terms(), ORDER)

    assert ending.outcome is Outcome.FAILED
    assert "the reason was reported only to the previous controller" in (ending.error or "")


async def test_a_source_that_ends_in_post_copy_takes_the_guest_along() -> None:
    migrations = FakeMover(presences=[(MOVING, ON_PART)] * 5 + [(GONE, ON_PART)])
    ending = await adopted(migrations, terms(), HYBRID)

    assert ending.outcome is Outcome.LOST


async def test_at_the_end_of_a_post_copy_it_looks_so_for_a_moment() -> None:
    migrations = FakeMover(
        presences=[(MOVING, ON_PART)] * 5 + [(GONE, ON_PART)] * 20 + [(GONE, RUNS)]
    )
    ending = await adopted(migrations, terms(), HYBRID)

    assert ending.outcome is Outcome.COMPLETED


async def orphan(migrations: FakeHosts) -> "asyncio.Task[None]":
    """libvirt's call goes on; nobody waits for it."""
    call = asyncio.create_task(migrations.migrate(HYBRID))
    await asyncio.sleep(2.0)
    return call


async def test_its_policy_still_decides() -> None:
    migrations = hosts()
    call = await orphan(migrations)
    ending = await adopted(migrations, UNDER, HYBRID)
    await call

    assert ending.outcome is Outcome.COMPLETED
    assert ("now", "switch to post-copy") in told(ending)
    assert not ENDS_A_PART - {"forget source"} & set(after_the_switch(migrations))


async def test_a_post_copy_that_breaks_under_the_second_controller_is_resumed() -> None:
    migrations = hosts(resets=[12.0])
    call = await orphan(migrations)
    ending = await adopted(migrations, UNDER, HYBRID)
    call.exception()

    assert ending.outcome is Outcome.COMPLETED
    assert migrations.resumes >= 1


class Fence:
    """Somebody else takes over after that many changes."""

    def __init__(self, changes: int, error: Exception) -> None:
        self.left = changes
        self.error = error

    def check(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error


class Fenced:
    """Hosts whose lanes ask `check` before each change, as Hypervisor.command does."""

    def __init__(self, migrations: FakeHosts, check: Callable[[], None]) -> None:
        self._migrations, self._check = migrations, check

    def __getattr__(self, name: str) -> Any:
        if name not in ("sample", "totals", "presence", "max_downtime", "stream_given_up"):
            self._check()
        return getattr(self._migrations, name)


LOST = LeaseLost("another controller has taken over")


async def test_whoever_lost_the_lease_changes_nothing_any_more() -> None:
    migrations = hosts()
    fence = Fence(2, LOST)  # the downtime limit and the order; the switch is refused
    with pytest.raises(LeaseLost):
        await run(Fenced(migrations, fence.check), UNDER, order=HYBRID)

    assert [call.split()[0] for call in migrations.calls] == ["downtime", "move"]


async def test_while_the_lease_is_in_doubt_it_is_tried_again_later() -> None:
    migrations = hosts()
    doubt = HypervisorError("the journal does not answer", host="")
    fence = Fence(2, doubt)

    def check() -> None:
        if asyncio.get_running_loop().time() < 30.0:
            fence.check()

    ending = await run(Fenced(migrations, check), UNDER, order=HYBRID)

    assert ending.outcome is Outcome.COMPLETED
    assert ending.switched is not None
    assert ending.switched > 15.0
    assert any("journal does not answer" in warning for warning in ending.warnings)


class LostDesk(FakeDesk):
    """The journal says that somebody else has taken over."""

    def take_requests(self) -> list[Request]:
        if asyncio.get_running_loop().time() > 5.0:
            raise LOST
        return []


async def test_a_controller_that_only_watches_notices_too() -> None:
    with pytest.raises(LeaseLost):
        await run(hosts(), UNDER, order=HYBRID, step_log=LostDesk([]))


class FullDesk(FakeDesk):
    """Nothing can be written any more."""

    async def intend(self, step: str, intent: Any) -> None:
        await super().intend(step, intent)
        raise JournalError("journal: no space left on device")


async def test_what_must_be_put_back_is_not_done_unless_it_is_written_down() -> None:
    step_log = FullDesk([(4.0, RequestKind.PAUSE, {})])
    migrations = hosts()
    await run(migrations, UNDER, order=HYBRID, step_log=step_log)

    assert step_log.intents == ["pause"]
    assert "halt" not in migrations.calls
    assert step_log.answers[0][1] is False
    assert "no space left" in step_log.answers[0][2]


async def test_a_pause_is_written_down_first() -> None:
    step_log = FakeDesk([(4.0, RequestKind.PAUSE, {})])
    migrations = hosts()
    await run(migrations, UNDER, order=HYBRID, step_log=step_log)

    assert step_log.intents == ["pause"]
    assert "halt" in migrations.calls
