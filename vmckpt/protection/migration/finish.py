"""How a migration by epochs ends: the guest stays where it is, or has gone over.

Nobody but the source knows which. So the source is asked first; the standby runs nothing before it
is told that the source has given the guest away, and may be taken away as soon as it is known that
the source never will.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vmckpt.errors import OutcomeUnknown, VmckptError
from vmckpt.model.host import Host
from vmckpt.protection import agent_client
from vmckpt.protection.agent_status import ProtectionStatus
from vmckpt.replication.session import ProtectionOutcome
from vmckpt.units import Seconds

_TURN = 0.1
_ARRIVES = Seconds(60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Both ends of one."""

    guest: str
    uuid: str
    source: Host
    target: Host
    session: str

    @property
    def state(self) -> str:
        """Where the source keeps what outlives a reboot."""
        return agent_client.kept_in(self.source, self.uuid)


def is_given(ours: ProtectionStatus) -> bool:
    """Whether the source, by what it says, has given the guest away for good."""
    return ours.given


def has_arrived(theirs: ProtectionStatus) -> bool:
    """Whether the guest runs on the target, by what that says; there as any other guest, once all
    that was left of its move is removed."""
    ordinary = theirs.knows_nothing and bool(theirs.runs)
    return theirs.outcome == ProtectionOutcome.FAILED_OVER or ordinary


def never_ran(theirs: ProtectionStatus) -> bool:
    """Whether the target's QEMU is gone, and the guest never ran in it."""
    there = theirs.role == "backup" and theirs.outcome in (
        None,
        ProtectionOutcome.LOST,
    )
    return there and not theirs.runs and not theirs.agent and not theirs.ran


async def call_off(pair: Pair, say: Callable[[str], None]) -> ProtectionStatus | None:
    """Let the guest run on on the source, with nothing left of it; None: done.

    If the source has given it away already it is finished instead: what the target says.
    Raises VmckptError: not all is put back; may be repeated.
    """
    if has_arrived(await agent_client.status(pair.target, pair.uuid)):
        return await finish(pair, say)
    told = await agent_client.order(
        pair.source, pair.uuid, "end", owner=pair.session, state=pair.state
    )
    if told.get("given"):
        return await finish(pair, say)
    await _remove_standby(pair, say, told)
    return None


async def finish(pair: Pair, say: Callable[[str], None]) -> ProtectionStatus | None:
    """The source has given it away: see it running on the target, and remove what is left; what the
    target said. None: the target could not take it, and it runs on on the source.

    Raises OutcomeUnknown, VmckptError; may be repeated.
    """
    give_up = time.monotonic() + _ARRIVES
    while not has_arrived(told := await agent_client.status(pair.target, pair.uuid)):
        if never_ran(told):
            await _take_back(pair, say, told)
            return None
        if time.monotonic() > give_up or told.knows_nothing:
            why = told.says or told.error or "it knows nothing of it"
            raise OutcomeUnknown(
                f"{pair.guest} was given to {pair.target.name} and does not run there: {why}",
                host=pair.target.name,
                hint="mend that host, then run vmckpt recover",
            )
        # The source's word may have been lost.
        with suppress(VmckptError):
            await agent_client.order(pair.target, pair.uuid, "ask", wish="failover")
        await asyncio.sleep(_TURN)
    ending = asyncio.create_task(
        agent_client.order(pair.target, pair.uuid, "end", owner=pair.session),
        name="end at the target",
    )
    await _tidy_source(pair, say)
    await ending
    return told


async def _tidy_source(pair: Pair, say: Callable[[str], None]) -> None:
    try:
        await agent_client.order(
            pair.source, pair.uuid, "end", owner=pair.session, define=False, standby_gone=True,
            state=pair.state,
        )  # fmt: skip
    except VmckptError as exc:
        say(f"{pair.source.name}: what was left of {pair.guest} there is not removed: {exc}")


async def _take_back(pair: Pair, say: Callable[[str], None], theirs: ProtectionStatus) -> None:
    why = theirs.says or "its QEMU ended"
    say(f"{pair.target.name} could not take {pair.guest}: {why}")
    told = await agent_client.order(
        pair.source, pair.uuid, "end", owner=pair.session, standby_gone=True, state=pair.state
    )
    await _remove_standby(pair, say, told)


async def _remove_standby(pair: Pair, say: Callable[[str], None], told: Mapping[str, Any]) -> None:
    """The source's side has ended, and did what is told."""
    for line in told["did"]:
        say(f"{pair.source.name}: {line}")
    told = await agent_client.order(pair.target, pair.uuid, "end", owner=pair.session)
    for line in told["did"]:
        say(f"{pair.target.name}: {line}")
