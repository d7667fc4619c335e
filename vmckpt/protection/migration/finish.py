"""Finish a migration by epochs: the guest either stays on the source or runs on the target.

Only the source knows which of the two applies, so the source is queried first. The standby is
started only after the source has handed the guest over, and it may be removed only once the source
can no longer do so.
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
    """Source and target of one migration by epochs."""

    guest: str
    uuid: str
    source: Host
    target: Host
    session: str

    @property
    def state(self) -> str:
        """The source's directory for files that survive a reboot."""
        return agent_client.kept_in(self.source, self.uuid)


def is_given(ours: ProtectionStatus) -> bool:
    """Return whether the source reports that it has handed the guest over for good."""
    return ours.given


def has_arrived(theirs: ProtectionStatus) -> bool:
    """Return whether the guest is running on the target, according to the target's answer.

    After the cleanup of the migration, the target reports an ordinary guest.
    """
    ordinary = theirs.knows_nothing and bool(theirs.runs)
    return theirs.outcome == ProtectionOutcome.FAILED_OVER or ordinary


def never_ran(theirs: ProtectionStatus) -> bool:
    """Return whether the target's QEMU and agent are gone, and the guest never ran there."""
    there = theirs.role == "backup" and theirs.outcome in (
        None,
        ProtectionOutcome.LOST,
    )
    return there and not theirs.runs and not theirs.agent and not theirs.ran


async def call_off(pair: Pair, say: Callable[[str], None]) -> ProtectionStatus | None:
    """Cancel the migration, so that the guest keeps running on the source. Returns None.

    If the source has already handed the guest over, the migration is finished instead, and the
    result of `finish` is returned. `say` receives warnings. Raises OutcomeUnknown, VmckptError;
    parts of the migration may then be left. May be repeated.
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
    """Wait until the guest that the source has handed over is running on the target, and clean up.

    Returns the target's answer; None if the target could not run the guest and the guest resumed on
    the source. `say` receives warnings. Raises OutcomeUnknown, VmckptError; may be repeated.
    """
    give_up = time.monotonic() + _ARRIVES
    while not has_arrived(told := await agent_client.status(pair.target, pair.uuid)):
        if never_ran(told):
            await _take_back(pair, say, told)
            return None
        if time.monotonic() > give_up or told.knows_nothing:
            why = told.says or told.error or "the reason is unknown"
            if told.knows_nothing:
                why = "the host has no record of the migration"
            raise OutcomeUnknown(
                f"{pair.guest} was handed over to {pair.target.name}, which does not report it as"
                f" running: {why}",
                host=pair.target.name,
                hint=f"run vmckpt doctor {pair.target.name}, fix the problems, then run vmckpt"
                " recover",
            )
        # The source's message to the standby may have been lost.
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
        say(f"{pair.source.name}: could not clean up after migrating {pair.guest}: {exc}")


async def _take_back(pair: Pair, say: Callable[[str], None], theirs: ProtectionStatus) -> None:
    why = theirs.says or "its QEMU process is gone"
    say(f"{pair.target.name} could not run {pair.guest}: {why}")
    told = await agent_client.order(
        pair.source, pair.uuid, "end", owner=pair.session, standby_gone=True, state=pair.state
    )
    await _remove_standby(pair, say, told)


async def _remove_standby(pair: Pair, say: Callable[[str], None], told: Mapping[str, Any]) -> None:
    """Remove the standby. `told`: the source's answer after its side has ended."""
    for line in told["did"]:
        say(f"{pair.source.name}: {line}")
    told = await agent_client.order(pair.target, pair.uuid, "end", owner=pair.session)
    for line in told["did"]:
        say(f"{pair.target.name}: {line}")
