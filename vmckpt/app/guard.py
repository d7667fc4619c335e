"""Run a risky command under guard: a checkpoint, the command, a look, and the way back."""

import asyncio
import time
from dataclasses import dataclass, field, replace

from vmckpt.app import fleet, snapshots
from vmckpt.app.controller import Controller
from vmckpt.errors import BadInput, Cancelled, KeyRefused, VmckptError
from vmckpt.inventory import Inventory
from vmckpt.journal import recorder as journal
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
from vmckpt.snapshot.restore import restore
from vmckpt.snapshot.restore.restore import Opened
from vmckpt.store.backend.factory import backend_of
from vmckpt.store.keys.identity import public_of
from vmckpt.store.keys.keyring import Keyring
from vmckpt.store.repository import Store
from vmckpt.units import Seconds

_TURN = Seconds(2.0)


async def guard(
    controller: Controller, store: str | None, request: GuardRequest,
    *, identity: Identity | None, outside: Outside,
) -> GuardResult:  # fmt: skip
    """Run a command that may harm a guest; if it or the check fails, the guest goes back.

    Setting `caller.stop` gives it up: before the command is run nothing is left, after that the
    guest goes back. Raises what taking and restoring raise. That the way back is open is tried
    before the command is run.
    """
    inventory, caller = controller.inventory, controller.caller
    inventory.may_act()
    place = inventory.store(store)
    await asyncio.to_thread(_can_open, snapshots.keyring(), identity)
    known = await fleet.guests(inventory)
    host = snapshots.host_of(inventory, request.guest, known)
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
        return await work.run()
    finally:
        await asyncio.to_thread(recorder.close)


def _can_open(keys: Keyring, identity: Identity | None) -> None:
    """Raises KeyRefused if nobody here could open a snapshot that is taken now."""
    if not keys.encrypts:
        return
    if identity is None:
        raise KeyRefused(
            "snapshots are encrypted, and there is no way back without a key; nothing was done",
            hint="name an identity with --identity, or by VMCKPT_IDENTITY",
        )
    if public_of(identity()) not in {one.key for one in keys.admins()}:
        raise KeyRefused(
            "snapshots are not encrypted for this identity; nothing was done",
            hint="vmckpt snapshot keys list shows for whom they are",
        )


async def _way_is_open(
    controller: Controller, place: StorePlace, taken: Taken,
    identity: Identity | None,
) -> Opened:  # fmt: skip
    """Try all of a restore that changes nothing. If it cannot be, the snapshot goes again."""
    inventory, caller = controller.inventory, controller.caller
    try:
        opened = await asyncio.to_thread(snapshots.opened_in, place, taken.id, identity)
        back = RestoreRequest(snapshot=taken.id, end_running=True)
        # What it warns of is what another host may lack: this one runs the guest.
        await restore.rehearse(inventory.host(taken.host), opened, back)
    except VmckptError:
        caller.warn("there would be no way back: the command was not run")
        await asyncio.to_thread(_delete, place, taken.id)
        raise
    return opened


def _delete(place: StorePlace, snapshot: str) -> None:
    Store.open(backend_of(place.url)).delete(snapshot)


async def _states(inventory: Inventory, guest: str) -> tuple[dict[str, GuestState], list[str]]:
    """How a guest is on each host that knows it, and which hosts do not answer."""
    found, errors = await fleet.guests(inventory)
    named = {host.name: one.state for host, one in found if guest in (one.uuid, one.name)}
    return named, list(errors)


@dataclass(slots=True, kw_only=True)
class _Guarding:
    """A guard from the moment that its checkpoint is there."""

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
                f"the checkpoint {self.taken.id} is kept; the way back is"
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
        """Run the command, and look at the guest; why it must go back, or nothing."""
        try:
            self.status = await self.outside.run(
                self.request.command, guard_rules.guard_env(self.taken)
            )
        except BadInput as exc:
            self.status = 127  # as a shell says it
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
            return "the check did not end in time"
        return "" if status == 0 else f"the check failed: {in_words(status)}"

    async def _back(self, why: str) -> Restored:
        """Put the checkpoint in place of what the guest has become; nothing breaks this off."""
        self.caller.warn(f"{why}: {self.taken.guest} goes back to {self.taken.id}")
        states, _ = await _states(self.controller.inventory, self.opened.public.guest_uuid)
        runs = [host for host, state in states.items() if state.is_active]
        request = RestoreRequest(
            snapshot=self.taken.id, end_running=True, on_restore=self.request.on_restore
        )
        deaf = replace(self.caller, stop=asyncio.Event())
        return await snapshots.restore(
            replace(self.controller, caller=deaf), self.place.name, request,
            on=runs[0] if len(runs) == 1 else self.taken.host, identity=self.identity,
            closed_too=True,
        )  # fmt: skip
