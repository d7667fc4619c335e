"""The failure detector for protections without a lease store, run by a service."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field

from vmckpt.errors import GuestLocked, VmckptError
from vmckpt.inventory import Inventory
from vmckpt.journal.records import Operation
from vmckpt.model.events import Caller
from vmckpt.policy.model import Protection
from vmckpt.protection import active, failover_policy, solo_permission, stop
from vmckpt.protection.failover_policy import FailoverAction, FailoverDecision
from vmckpt.protection.host_death import Case
from vmckpt.protection.request import Judge
from vmckpt.protection.stop import Known
from vmckpt.scheduler.service import Told
from vmckpt.units import Seconds

_LOOK = Seconds(3.0)
_EACH = Seconds(0.5)
"""Pause between two rounds, per protection: each check logs in to two hosts."""
_AGAIN = Seconds(30.0)
"""Pause after a failure, so that a fence agent that fails is not run continuously."""


@dataclass(slots=True)
class FailureDetector:
    """Checks all protections periodically until the task of `keep` is cancelled."""

    inventory: Inventory
    ours: Callable[[], Awaitable[bool]]
    """Returns whether this service, and no other, runs the failure detector."""
    tell: Callable[[Told], None]
    _looks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _acting: set[asyncio.Task[None]] = field(default_factory=set)
    _not_before: dict[str, float] = field(default_factory=dict)
    _said: dict[str, str] = field(default_factory=dict)
    _hosts: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """A lock for each primary host, so that its failovers run one at a time: the first powers the
    host off, and the later failovers find it off."""

    async def keep(self) -> None:
        """Check all protections that have no live controller, until cancelled.

        A failover in progress is completed before this method returns.
        """
        try:
            while True:
                watched = await self._watched()
                for one in watched:
                    self._begin(one)
                await asyncio.sleep(max(_LOOK, _EACH * len(watched)))
        finally:
            for task in self._looks.values():
                task.cancel()
            await asyncio.gather(*self._looks.values(), *self._acting, return_exceptions=True)

    async def _watched(self) -> list[Known]:
        try:
            if not await self.ours():
                return []
            found = await asyncio.to_thread(_unattended, self.inventory)
        except Exception as exc:  # noqa: BLE001 - the next check may succeed
            why = str(exc) if isinstance(exc, VmckptError) else repr(exc)
            self._say("journal", f"no failure detection for protected guests: {why}")
            return []
        self._said.pop("journal", None)
        self._said = {key: text for key, text in self._said.items() if key in found}
        for job, (operation, known) in found.items():
            if known is None:
                hosts = f"{operation.source} and {operation.target}"
                self._say(job, f"no failure detection for {operation.guest}: hosts.yaml does not"
                               f" list both {hosts}")  # fmt: skip
        return [known for _, known in found.values() if known is not None]

    def _begin(self, known: Known) -> None:
        job = known.operation.id
        before = self._looks.get(job)
        if before is not None and not before.done():
            return
        if time.monotonic() >= self._not_before.get(job, 0.0):
            self._looks[job] = asyncio.create_task(self._look(known), name=f"watch {job}")

    async def _look(self, known: Known) -> None:
        job, guest = known.operation.id, known.operation.guest
        try:
            case = await stop.seen(known)
            decision = _decided(known, case)
            if decision.do in (FailoverAction.WAIT, FailoverAction.FAIL_OVER):
                self._say(job, f"{guest}: {decision.why}" if decision.why else "")
            if decision.do is not FailoverAction.WAIT:
                await self._see_through(self._act(known, case, decision))
        except GuestLocked as exc:  # another controller has the job, or the failover is refused
            self._say(job, f"{guest}: {exc}")
        # An error in one protection must not stop the others.
        except Exception as exc:  # noqa: BLE001
            self._not_before[job] = time.monotonic() + _AGAIN
            self._said[job] = ""
            why = str(exc) if isinstance(exc, VmckptError) else repr(exc)
            self._say(job, f"{guest}: {why}; retrying in {_AGAIN:g} s")

    async def _see_through(self, work: Coroutine[None, None, None]) -> None:
        """Await work that must continue even if the service is stopped meanwhile.

        A failover must not stop between powering the host off and starting the standby.
        """
        acting = asyncio.create_task(work)
        self._acting.add(acting)
        acting.add_done_callback(self._acting.discard)
        await asyncio.shield(acting)

    async def _act(self, known: Known, case: Case, decision: FailoverDecision) -> None:
        job, guest = known.operation.id, known.operation.guest
        caller = Caller(emit=lambda _: None, warn=self._warn, stop=asyncio.Event())
        if decision.do is FailoverAction.FAIL_OVER:
            host = self._hosts[known.primary.name]
            waits = host.locked()
            async with host:
                if waits:  # the host may answer again by now
                    case = await stop.seen(known)
                    if _decided(known, case).do is not FailoverAction.FAIL_OVER:
                        return
                done = await stop.failover(known, caller, case=case)
            text = f"{guest} failed over to {done.runs_on}: {done.why}"
            self.tell(Told(event="failed over", text=text, values=done.as_json()))
            return
        with stop.attended(known, caller) as recorder:
            if decision.do is FailoverAction.GRANT_SOLO:
                await solo_permission.note(recorder, job, decision.why)
                await solo_permission.grant(known.primary, known.uuid, str(case.ours.wants_leave))
            elif _decided(known, await stop.seen(known)).do is FailoverAction.STANDBY_RESTORED:
                # The state is checked again, because from here on no other controller can grant
                # the permission.
                await solo_permission.close(recorder, job)
            else:
                return
        self.tell(Told(event=str(decision.do), text=f"{guest}: {decision.why}"))

    def _say(self, key: str, text: str) -> None:
        """Report a warning if its text has changed; an empty text clears the warning."""
        if text and self._said.get(key) != text:
            self._warn(text)
        self._said[key] = text

    def _warn(self, line: str) -> None:
        self.tell(Told(event="warning", text=line))


def _unattended(inventory: Inventory) -> dict[str, tuple[Operation, Known | None]]:
    """Return the operations that need a failure detector, by job ID, each with its protection.

    The protection is None if one of its hosts is not in the inventory.
    """
    found: dict[str, tuple[Operation, Known | None]] = {}
    for one in active.unattended():
        if one.detail.get("judge") == Judge.WATCH:
            there = {one.source, one.target} <= set(inventory.hosts)
            found[one.id] = one, active.known(inventory, one) if there else None
    return found


def _decided(known: Known, case: Case) -> FailoverDecision:
    terms = Protection.from_json(known.operation.detail["terms"])
    return failover_policy.decide(case, patience=terms.lease)
