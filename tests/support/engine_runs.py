"""One run of the engine, as tests want it."""

import asyncio
import dataclasses
from typing import Any

from tests.support.fake_drivers import FakeDesk, Told
from tests.support.policies import policy
from vmckpt.migration.run.decide import RunTerms, time_limit
from vmckpt.migration.run.engine import Ending, Migration
from vmckpt.model.events import Event, PhaseChanged
from vmckpt.model.migration import Driver, JobPhase, MigrationDriver, Mode, MoveOrder
from vmckpt.units import MIB, Bytes, Seconds

ORDER = MoveOrder(
    driver=Driver.PEER_TO_PEER, persistent=True, autostart=False, storage_proven=True,
    bandwidth=None,
)  # fmt: skip
HYBRID = dataclasses.replace(ORDER, post_copy=True)


def terms(rules: str = "", *, mode: Mode = Mode.PRECOPY, more: str = "") -> RunTerms:
    """Under a policy with these rules (YAML, one in a line) and 100 ms of downtime."""
    text = f"version: vmckpt/v1\nname: mine\nmode: {mode}\n"
    limits = "" if "limits:" in more else "limits: {max_downtime: 100ms}\n"
    made = policy(text + limits + more + "converge: {rules: [" + rules + "]}\n")
    memory = Bytes(1024 * MIB)
    return RunTerms(
        policy=made, mode=mode, memory=memory, post_copy=mode.may_switch_early,
        time_limit=time_limit(made, memory), max_downtime=made.limits.max_downtime,
    )  # fmt: skip


async def run(
    migrations: MigrationDriver,
    under: RunTerms | None = None,
    *,
    timeout: float | None = None,
    stops: tuple[float, ...] = (),
    events: list[Event] | None = None,
    order: MoveOrder = ORDER,
    step_log: FakeDesk | None = None,
    stop: asyncio.Event | None = None,
    **more: Any,
) -> Ending:
    """Migrate; the operator asks to stop at the times `stops`."""
    stop = stop or asyncio.Event()
    for at in stops:
        asyncio.get_running_loop().call_later(at, stop.set)
    under = under or terms()
    if timeout is not None:
        under = dataclasses.replace(under, time_limit=Seconds(timeout))
    emit = (events if events is not None else []).append
    return await Migration(migrations, under, emit, stop, step_log=step_log, **more).run(order)


def phases(events: list[Event]) -> list[JobPhase]:
    return [one.phase for one in events if isinstance(one, PhaseChanged)]


def told(ending: Ending) -> list[tuple[str, str]]:
    """Rule and action of each decision."""
    return [(one.rule, one.action) for one in ending.decisions]


# Nothing of these may ever be called once a guest is in two parts.
ENDS_A_PART = {"abort", "forget source", "autostart", "downtime", "throttle", "bandwidth"}


def after_the_switch(migrations: Told) -> list[str]:
    """What was called from the switch on, without details."""
    names = [name for _, name in migrations.times]
    return names[names.index("post-copy") + 1 :]
