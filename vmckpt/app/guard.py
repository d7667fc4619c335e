"""Run a risky command after taking a checkpoint, check the guest, and roll back on failure."""

import asyncio
import time
from dataclasses import dataclass, field, replace

from vmckpt.app import fleet, permission, snapshot_restore, snapshots, stores
from vmckpt.app.controller import Controller
from vmckpt.errors import BadInput, Cancelled, VmckptError
from vmckpt.inventory import Inventory
from vmckpt.journal import recorder as journal
from vmckpt.journal.cancel_requests import answered
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import NewOperation
from vmckpt.model.disk import StorePlace
from vmckpt.model.events import Caller
from vmckpt.model.guest import GuestState
from vmckpt.model.migration import Outcome
from vmckpt.snapshot import guard_rules
from vmckpt.snapshot.catalog import Identity
from vmckpt.snapshot.guard import Outside, in_words
from vmckpt.snapshot.guard_rules import Ending, GuardRequest, GuardResult
from vmckpt.snapshot.request import Restored, RestoreRequest, Step, Taken, TakeRequest
from vmckpt.snapshot.restore import domain_xml, restore
from vmckpt.snapshot.restore.restore import Opened
from vmckpt.store.backend.factory import backend_of
from vmckpt.store.repository import Store
from vmckpt.units import Seconds

_TURN = Seconds(2.0)


async def guard(
    controller: Controller, store: str | None, request: GuardRequest,
    *, identity: Identity | None, outside: Outside,
) -> GuardResult:  # fmt: skip
    """Run a command that may harm a guest; roll the guest back if the command or the check fails.

    A restore of the checkpoint is rehearsed before the command runs. If `caller.stop` is set before
    the command runs, the checkpoint is deleted; if it is set later, the guest is rolled back.
    Raises KeyRefused, Cancelled, ReadOnly, and the errors of taking and restoring a snapshot.
    """
    inventory, caller = controller.inventory, controller.caller
    permission.require(inventory, "guard", guest=request.guest)
    place = inventory.store(store)
    await asyncio.to_thread(stores.require_key, identity)
    known = await fleet.guests(inventory)
    host = fleet.host_of(inventory, request.guest, known)
    paused = any(
        one.state is GuestState.PAUSED
        for at, one in known[0]
        if at == host and request.guest in (one.uuid, one.name)
    )
    take = TakeRequest(
        guest=request.guest, name=request.name, tags=guard_rules.tags(request.command)
    )  # fmt: skip
    taken = await snapshots.take(controller, store, take)
    opened = await _way_is_open(controller, place, taken, identity)
    if caller.stop.is_set():
        await asyncio.to_thread(_delete, place, taken.id)
        raise Cancelled("stopped before the command was run; nothing was changed")
    new = NewOperation(
        kind="guard", guest=taken.guest, guest_uuid=opened.public.guest_uuid, source=host.name,
        detail={"store": place.name, "snapshot": taken.id, "check": request.check},
    )  # fmt: skip
    recorder = await asyncio.to_thread(journal.begin, new, caller.warn)
    work = _Guarding(
        controller=controller, place=place, request=request, identity=identity,
        outside=outside, recorder=recorder, taken=taken, opened=opened,
        was_paused=paused,
    )  # fmt: skip
    try:
        async with answered(recorder, caller.stop):
            return await work.run()
    finally:
        await asyncio.to_thread(recorder.close)


async def _way_is_open(
    controller: Controller, place: StorePlace, taken: Taken,
    identity: Identity | None,
) -> Opened:  # fmt: skip
    """Rehearse a restore of the checkpoint without changing anything.

    If the checkpoint cannot be restored, deletes it and raises the error of the rehearsal.
    """
    inventory, caller = controller.inventory, controller.caller
    try:
        opened = await asyncio.to_thread(snapshot_restore.opened_in, place, taken.id, identity)
        back = RestoreRequest(snapshot=taken.id, end_running=True)
        # Warnings are ignored: they concern another host, and this host already runs the guest.
        await restore.rehearse(inventory.host(taken.host), opened, back)
    except VmckptError:
        caller.warn("the checkpoint cannot be restored; the command was not run")
        await asyncio.to_thread(_delete, place, taken.id)
        raise
    return opened


def _delete(place: StorePlace, snapshot: str) -> None:
    Store.open(backend_of(place.url)).delete(snapshot)


async def _states(inventory: Inventory, guest: str) -> tuple[dict[str, GuestState], list[str]]:
    """Return a guest's state on each host that has the guest, and the hosts that do not answer.

    `guest`: name or UUID.
    """
    found, errors = await fleet.guests(inventory)
    named = {host.name: one.state for host, one in found if guest in (one.uuid, one.name)}
    return named, list(errors)


@dataclass(slots=True, kw_only=True)
class _Guarding:
    """A guarded run whose checkpoint exists, until its result is recorded."""

    controller: Controller
    place: StorePlace
    request: GuardRequest
    identity: Identity | None
    outside: Outside
    recorder: Recorder
    taken: Taken
    opened: Opened
    was_paused: bool
    checks: int = field(default=0)
    status: int = field(default=0)

    @property
    def caller(self) -> Caller:
        return self.controller.caller

    async def run(self) -> GuardResult:
        meant = {
            "snapshot": self.taken.id,
            "store": self.place.name,
            "command": self.request.command[0],
        }
        await asyncio.to_thread(self.recorder.intend, Step.GUARD, meant)
        try:
            why = await self._wrong()
            restored = await self._back(why) if why else None
        except VmckptError as exc:
            self.recorder.finish(Outcome.FAILED, {"error": str(exc)})
            self.caller.warn(
                f"checkpoint {self.taken.id} is kept; to restore it, run"
                f" {guard_rules.way_back(self.taken.id, self.place.name)}"
            )
            raise
        ending = Ending.BACK if why else Ending.KEPT
        if not why and self.request.drop:
            await asyncio.to_thread(_delete, self.place, self.taken.id)
            ending = Ending.DROPPED
        done = GuardResult(
            ending=ending, why=why, stopped=self.caller.stop.is_set(), command=self.status,
            checks=self.checks, taken=self.taken, restored=restored, job=self.recorder.id,
        )  # fmt: skip
        outcome = Outcome.FAILED if why else Outcome.COMPLETED
        self.recorder.finish(outcome, done.as_json())
        return done

    async def _wrong(self) -> str:
        """Run the command and check the guest.

        Returns why the guest must be rolled back, or an empty string.
        """
        try:
            self.status = await self.outside.run(
                self.request.command, guard_rules.guard_env(self.taken)
            )
        except BadInput as exc:
            self.status = 127  # a shell's status for a command that cannot be run
            self.caller.warn(str(exc))
        why = guard_rules.wrong_with_command(self.status, stopped=self.caller.stop.is_set())
        return why or await self._wrong_after()

    async def _wrong_after(self) -> str:
        give_up = time.monotonic() + self.request.check_for
        while True:
            self.checks += 1
            why = await self._wrong_now(Seconds(give_up - time.monotonic()))
            if self.caller.stop.is_set():
                return guard_rules.wrong_with_command(0, stopped=True)
            left = give_up - time.monotonic()
            if not why or left <= 0:
                return why
            try:
                await asyncio.wait_for(self.caller.stop.wait(), min(_TURN, left))
            except TimeoutError:
                continue

    async def _wrong_now(self, left: Seconds) -> str:
        states, silent = await _states(self.controller.inventory, self.opened.public.guest_uuid)
        why = guard_rules.wrong_with_guest(states, silent, was_paused=self.was_paused)
        if why or self.request.check is None:
            return why
        try:
            told = guard_rules.guard_env(self.taken)
            status = await self.outside.shell(
                self.request.check, told, Seconds(max(left, 0.1))
            )  # fmt: skip
        except TimeoutError:
            return "the --check command did not finish in time"
        return "" if status == 0 else f"the --check command failed: {in_words(status)}"

    async def _back(self, why: str) -> Restored:
        """Roll the guest back to the checkpoint; this cannot be cancelled.

        Raises the errors of restoring a snapshot.
        """
        self.caller.warn(f"{why}; restoring {self.taken.guest} from {self.taken.id}")
        states, _ = await _states(self.controller.inventory, self.opened.public.guest_uuid)
        runs = [host for host, state in states.items() if state.is_active]
        # A lazy restore keeps no base images, so the disks would need more space than before.
        lazy = not domain_xml.bases(self.opened.private.facts.domain_xml)
        request = RestoreRequest(
            snapshot=self.taken.id, end_running=True, on_restore=self.request.on_restore, lazy=lazy
        )
        deaf = replace(self.caller, stop=asyncio.Event())
        return await snapshot_restore.restore(
            replace(self.controller, caller=deaf), self.place.name, request,
            on=runs[0] if len(runs) == 1 else self.taken.host, identity=self.identity,
            closed_too=True,
        )  # fmt: skip
