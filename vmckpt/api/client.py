"""The client of the Python API, which docs/api.md describes."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vmckpt.api import convert, results
from vmckpt.app import controller as controllers
from vmckpt.app import (
    evacuation,
    fleet,
    migration,
    policies,
    protection,
    snapshot_restore,
    snapshot_store,
    snapshots,
    stores,
)
from vmckpt.app.controller import Caller, Controller
from vmckpt.app.evacuation import Emptying
from vmckpt.errors import BadInput, Blocked, HostUnreachable, run_doctor, silent_hosts
from vmckpt.evacuation.plan.plan import Plan as EvacuationPlan
from vmckpt.evacuation.report import Report
from vmckpt.evacuation.task import Kind, Task
from vmckpt.migration.outcome_error import migration_error
from vmckpt.migration.request import MigrateRequest, PolicyOverrides
from vmckpt.model import guest as model_guest
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.migration import Mode, Outcome
from vmckpt.policy.model import Failover
from vmckpt.policy.values import LONGEST_DOWNTIME
from vmckpt.protection.stop import StopResult
from vmckpt.snapshot.request import RestoreRequest, TakeRequest
from vmckpt.units import MIB, BytesPerSecond, Seconds

log = logging.getLogger("vmckpt.api")
T = TypeVar("T")


class Client:
    """Acts on the hosts of one inventory.

    Methods may run at the same time, in one event loop. If the task of a method is cancelled, the
    operation is stopped as by Ctrl-C: the method waits until the state of the guest is known, and
    then raises CancelledError. Methods that change anything raise ReadOnly in read-only mode,
    NotPermitted if the inventory has roles and the user lacks the role that a command needs, and
    JournalError if the journal cannot be written.
    """

    def __init__(
        self,
        inventory: str | Path | None = None,
        *,
        policies: str | Path | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """Read the inventory.

        `inventory`: a hosts.yaml; None: the one that VMCKPT_INVENTORY names, or ./hosts.yaml.
        `policies`: a directory of policies; None: the inventory's. `warn`: called with each
        warning, from any thread; None: warnings go to the logger "vmckpt.api". Raises
        InventoryError, and NotPermitted if the inventory gives the user no role.
        """
        path = None if inventory is None else Path(inventory)
        self._inventory = controllers.load_inventory(path)
        self._policies = None if policies is None else Path(policies)
        self._warn = log.warning if warn is None else warn

    # Looking

    async def hosts(self) -> Sequence[results.Host]:
        """Return all hosts. The `error` of a host says why it does not answer."""
        views, _ = await fleet.hosts(self._inventory)
        return [convert.host(one.host, one.facts, one.error) for one in views]

    async def guests(self, *, partly: bool = False) -> Sequence[results.Guest]:
        """Return the guests of all hosts.

        `partly`: ignore hosts that do not answer. Raises HostUnreachable if a host does not answer,
        unless `partly`; TwoCopies if a guest is running on two hosts; InventoryError if two hosts
        with the same guest may be one host.
        """
        listing = await fleet.listing(self._inventory)
        if twice := await fleet.copies(self._inventory, listing.found):
            raise model_guest.error(twice)
        if listing.errors and not partly:
            raise HostUnreachable(
                silent_hosts(listing.errors), host=next(iter(listing.errors)),
                hint=run_doctor(listing.errors),
            )  # fmt: skip
        return [convert.guest(one, host) for host, one in listing.found]

    async def status(self, guest: str | None = None) -> Sequence[results.Protection]:
        """Return the status of the protection of a guest; None: of all protections.

        Raises BadInput if the guest is not protected, and JournalError.
        """
        found = await protection.status(self._inventory, guest)
        return [convert.protection(one) for one in found]

    async def snapshots(
        self, guest: str | None = None, *, store: str | None = None
    ) -> Sequence[results.Snapshot]:
        """Return the snapshots of a store, the oldest first; unreadable snapshots come last.

        `guest`: a name or UUID; snapshots known to be of other guests are omitted. `store`: its
        name in the inventory; None: the first store. Raises InventoryError, StoreError.
        """
        found = await snapshot_store.listed(self._inventory, store, guest)
        return [convert.snapshot(one) for one in found]

    # Migrating

    async def plan(
        self, guest: str, to: str, *, policy: str | None = None, mode: str | None = None
    ) -> results.Plan:
        """Return what `migrate` would do, with all blockers and a forecast for each mode.

        Raises BadInput if there is no such guest, host or mode, PolicyError, HostUnreachable.
        """
        overrides = PolicyOverrides(mode=_mode(mode))

        async def act(stop: asyncio.Event) -> results.Plan:
            acting, forced = await self._with_policies(stop, policy)
            asked = MigrateRequest(
                guest=guest, to=to, policy=forced, overrides=overrides, dry_run=True
            )
            return convert.plan(*await migration.plan(acting, asked))

        return await self._stoppable(act)

    async def migrate(
        self,
        guest: str,
        to: str,
        *,
        policy: str | None = None,
        mode: str | None = None,
        bandwidth: int | None = None,
        max_downtime: float | None = None,
        timeout: float | None = None,
    ) -> results.Migration:
        """Move a running guest to another host, under its policy. Returns when it has arrived.

        `policy`: name of a policy instead of the guest's. `mode`, `bandwidth` (bytes per second),
        `max_downtime` and `timeout` (seconds) override the policy. Raises BadInput if an override
        is out of range, Blocked if the guest cannot be moved, MigrationFailed if it stayed on its
        host, PostcopyPaused, OutcomeUnknown, and the errors of `plan`.
        """
        if bandwidth is not None and bandwidth < MIB:
            raise BadInput("bandwidth must be at least 1 MiB/s", hint="libvirt's unit is MiB/s")
        if max_downtime is not None and max_downtime > LONGEST_DOWNTIME:
            raise BadInput(f"max_downtime must be at most {LONGEST_DOWNTIME:g} s")
        overrides = PolicyOverrides(
            mode=_mode(mode),
            bandwidth=None if bandwidth is None else BytesPerSecond(bandwidth),
            max_downtime=None if max_downtime is None else Seconds(max_downtime),
            timeout=None if timeout is None else Seconds(timeout),
        )

        async def act(stop: asyncio.Event) -> results.Migration:
            acting, forced = await self._with_policies(stop, policy)
            asked = MigrateRequest(guest=guest, to=to, policy=forced, overrides=overrides)
            report = await migration.migrate(acting, asked)
            if report.outcome is Outcome.BLOCKED:
                where = f"from {report.source} to {report.target}"
                _require_possible(f"{report.guest} cannot move {where}", report.findings)
            if (error := migration_error(report)) is not None:
                raise error
            return convert.migration(report)

        return await self._stoppable(act)

    async def plan_evacuation(
        self, host: str, *, to: Sequence[str] | None = None, policy: str | None = None
    ) -> results.EvacuationPlan:
        """Return what `evacuate` would do.

        `to`: possible targets; None: all other hosts. Raises BadInput if `host` is in `to`,
        InventoryError, PolicyError, HypervisorError if the host does not answer.
        """
        order = _evacuate(host, to)

        async def act(stop: asyncio.Event) -> results.EvacuationPlan:
            acting, forced = await self._with_policies(stop, policy)
            async with Emptying(acting, dataclasses.replace(order, policy=forced)) as emptying:
                return convert.evacuation_plan(await emptying.plan())

        return await self._stoppable(act)

    async def evacuate(
        self,
        host: str,
        *,
        to: Sequence[str] | None = None,
        policy: str | None = None,
        why: str = "",
        partly: bool = False,
    ) -> results.Evacuation:
        """Move all guests off a host, and put it into maintenance.

        `why`: a reason, shown by vmckpt maintenance list. `partly`: start even if some guests
        cannot be moved. Guests that are still on the host at the end are in the result. If the task
        is cancelled, no more moves begin, and running moves are completed. Raises Blocked if a
        guest cannot be moved and not `partly`, GuestLocked, and the errors of `plan_evacuation`.
        """
        order = _evacuate(host, to)

        async def act(stop: asyncio.Event) -> results.Evacuation:
            acting, forced = await self._with_policies(stop, policy)
            await evacuation.put_in_order(acting)
            async with Emptying(acting, dataclasses.replace(order, policy=forced)) as emptying:
                made = await emptying.plan()
                _refuse(made, partly=partly)
                report: Report = await emptying.carry_out(made, why, asyncio.Event())
            return convert.evacuation(report)

        return await self._stoppable(act)

    # Snapshots

    async def create_snapshot(
        self, guest: str, *, name: str | None = None, store: str | None = None, memory: bool = True
    ) -> results.CreatedSnapshot:
        """Take a snapshot of a guest.

        `name`: the snapshot's name; None: the current time. `store`: a store of the inventory;
        None: the first store. `memory`: whether memory is captured too. Raises BadInput,
        HostUnreachable, GuestLocked, CaptureFailed, StoreError, RemoteError.
        """
        request = TakeRequest(guest=guest, name=name, memory=memory)

        async def act(stop: asyncio.Event) -> results.CreatedSnapshot:
            return convert.created(await snapshots.take(self._controller(stop), store, request))

        return await self._stoppable(act)

    async def restore_snapshot(
        self,
        snapshot: str,
        *,
        on: str | None = None,
        fork: str | None = None,
        replace: bool = False,
        paused: bool = False,
        store: str | None = None,
        identity: str | Path | None = None,
    ) -> results.Restored:
        """Restore a guest from a snapshot.

        `snapshot`: its ID or name. `on`: the host; None: the host on which it was taken. `fork`:
        the name of a new guest, whose network links are down; None: the original guest. `replace`:
        destroy the guest if it is running, and overwrite its disks. `paused`: do not resume it.
        `store`: the store's name in the inventory; None: the first store that has the snapshot.
        `identity`: file with a private key that opens an encrypted snapshot; the key must not be
        protected by a passphrase. Raises BadInput, NotInStore, KeyRefused, StoreError, Blocked,
        GuestLocked, RemoteError.
        """
        request = RestoreRequest(snapshot=snapshot, fork=fork, end_running=replace, paused=paused)
        key = None if identity is None else stores.load_identity(Path(identity), None)

        async def act(stop: asyncio.Event) -> results.Restored:
            acting = self._controller(stop)
            done = await snapshot_restore.restore(acting, store, request, on=on, identity=key)
            return convert.restored(done)

        return await self._stoppable(act)

    # Protecting

    async def protect(
        self,
        guest: str,
        to: str | None = None,
        *,
        reverse: bool = False,
        automatic: bool | None = None,
        interval: float | None = None,
        policy: str | None = None,
    ) -> results.Protected:
        """Keep a standby of a running guest on another host. Returns when the standby is ready.

        `to`: the other host; may be None with `reverse`. `reverse`: after a failover, use the
        former host. `automatic`: whether the standby takes over without an operator; `interval`:
        seconds between epochs; None: as in the policy. Raises Blocked if the guest cannot be
        protected, BadInput, GuestLocked, HostUnreachable, RemoteError.
        """
        wishes: dict[str, Any] = {}
        if automatic is not None:
            wishes["failover"] = Failover.AUTOMATIC if automatic else Failover.MANUAL
        if interval is not None:
            wishes["interval"] = Seconds(interval)

        async def act(stop: asyncio.Event) -> results.Protected:
            acting, forced = await self._with_policies(stop, policy)
            request = protection.Request(
                guest=guest, to=to, policy=forced, wishes=wishes, storage=None, dry_run=False,
                reverse=reverse,
            )  # fmt: skip
            done = await protection.protect(acting, request, lambda _: None)
            what = f"{done.guest} cannot be protected by {done.backup}"
            _require_possible(what, done.findings)
            return convert.protected(done)

        return await self._stoppable(act)

    async def unprotect(self, guest: str) -> results.Ended:
        """End a guest's protection; the guest keeps running. Raises BadInput, RemoteError."""
        return await self._stoppable(
            lambda stop: _ended(protection.unprotect(self._controller(stop), guest))
        )

    async def failover(
        self, guest: str, *, planned: bool = False, host_is_off: bool = False
    ) -> results.Ended:
        """Fail a guest over to its standby.

        `planned`: without loss; both hosts must be up. `host_is_off`: confirms that the guest's
        host is off; if it is not, the guest runs on two hosts. Raises BadInput, FencingFailed,
        GuestLocked, RemoteError.
        """
        if planned and host_is_off:
            raise BadInput("planned and host_is_off are mutually exclusive", hint="use one of them")
        return await self._stoppable(
            lambda stop: _ended(
                protection.failover(
                    self._controller(stop), guest, planned=planned, dead=host_is_off
                )
            )
        )

    # Context

    def _controller(self, stop: asyncio.Event) -> Controller:
        caller = Caller(emit=lambda _: None, warn=self._warn, stop=stop)
        return Controller(inventory=self._inventory, caller=caller)

    async def _with_policies(
        self, stop: asyncio.Event, wanted: str | None
    ) -> tuple[Controller, str | None]:
        """Return the context with the policies, and the name of the wanted policy, if any."""
        shelf, forced = await asyncio.to_thread(
            policies.load_policies, self._inventory, self._policies, wanted
        )
        return dataclasses.replace(self._controller(stop), policies=shelf), forced

    @staticmethod
    async def _stoppable(act: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
        """Run an operation. If this task is cancelled, stop the operation and wait for its end."""
        stop = asyncio.Event()
        task = asyncio.create_task(act(stop))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([task])  # unlike gather, this would not cancel the operation
            if not task.cancelled():
                task.exception()  # the caller gets CancelledError instead
            raise


async def _ended(ending: Coroutine[Any, Any, StopResult]) -> results.Ended:
    return convert.ended(await ending)


def _mode(name: str | None) -> Mode | None:
    if name is None:
        return None
    try:
        return Mode(name)
    except ValueError:
        raise BadInput(f"no mode {name!r}", hint=f"use one of {', '.join(Mode)}") from None


def _require_possible(otherwise: str, findings: Sequence[Finding]) -> None:
    """Raise Blocked with all blockers, if there are any. `otherwise`: what they prevent."""
    found = [one for one in findings if one.severity is Severity.BLOCKER]
    if found:
        raise Blocked(f"{otherwise}: {'; '.join(one.text for one in found)}", hint=found[0].hint)


def _evacuate(host: str, to: Sequence[str] | None) -> Task:
    return Task(kind=Kind.EVACUATE, host=host, to=None if to is None else frozenset(to))


def _refuse(made: EvacuationPlan, *, partly: bool) -> None:
    """Raise Blocked if a guest cannot be moved, unless `partly`."""
    if made.left and not partly:
        told = "; ".join(f"{one.tenant.name}: {one.why}" for one in made.left[:10])
        more = f"; and {len(made.left) - 10} more" if len(made.left) > 10 else ""
        raise Blocked(
            f"not all guests of {made.task.host} can be moved: {told}{more}; nothing was changed",
            hint=made.left[0].hint,
        )
