"""Families of forks: start, list, drop and keep forks, and run a command for each."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vmckpt.app import fleet, permission, snapshot_restore, stores
from vmckpt.app.controller import Controller
from vmckpt.errors import (
    BadInput,
    Cancelled,
    NotInStore,
    RemoteError,
    VmckptError,
    silent_hosts,
)
from vmckpt.inventory import Inventory
from vmckpt.journal import jobs, maintenance
from vmckpt.model.disk import StorePlace
from vmckpt.model.events import Caller
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.snapshot import catalog, create, fork_commands, fork_rules, forks
from vmckpt.snapshot.catalog import Identity
from vmckpt.snapshot.fork_commands import ForkCommand
from vmckpt.snapshot.fork_rules import Family, Fork, ForkRequest, ForkTree, Keep, Ran
from vmckpt.snapshot.forks import Started
from vmckpt.snapshot.request import TakeRequest
from vmckpt.snapshot.restore.restore import Opened
from vmckpt.units import Seconds

_RELEASED_IN = Seconds(5.0)
"""How long the server of a family may take to unpin its snapshot after its last fork is gone."""
_TURN = Seconds(0.2)


async def start(
    controller: Controller, store: str | None, request: ForkRequest,
    *, on: str | None, identity: Identity | None,
) -> Started:  # fmt: skip
    """Start a family of forks of a running guest or of a snapshot.

    Of a running guest, a snapshot with memory is taken first; it is deleted again if no fork can be
    started. `store`: the store for it, or with the snapshot; None: the first store, or the first
    with the snapshot. `on`: the host; None: the host of the guest, or of the snapshot. Raises
    ReadOnly, NotPermitted, BadInput, Blocked if the host is in maintenance, KeyRefused,
    HostUnreachable, NotInStore, and the errors of snapshot.create.take and snapshot.forks.start.
    """
    inventory, caller = controller.inventory, controller.caller
    permission.require(inventory, "fork create", guest=request.source)
    fork_rules.check(request)
    found = await fleet.guests(inventory)
    family = forks.new_family()
    if not any(request.source in (guest.name, guest.uuid) for _, guest in found[0]):
        opened = await asyncio.to_thread(_snapshot, inventory, store, request, found, identity)
        host = await _open_host(inventory, on or opened.public.host)
        return await _started(caller, host, opened, family, request=request, found=found)
    at = fleet.find(inventory, request.source, found)
    host, place = await _open_host(inventory, on or at[0].name), inventory.store(store)
    id_ = await _taken(controller, at, place, family, identity)
    try:
        opened = await asyncio.to_thread(snapshot_restore.opened_in, place, id_, identity)
        return await _started(caller, host, opened, family, request=request, found=found)
    except VmckptError as exc:
        # If the agent did not answer, forks may be running.
        if exc.undone and not isinstance(exc, RemoteError):
            await _delete(controller, place, id_)
        raise


async def _started(
    caller: Caller, host: Host, opened: Opened, family: str,
    *, request: ForkRequest, found: fleet.FoundGuests,
) -> Started:  # fmt: skip
    prefix = request.prefix or f"{opened.public.guest}-fork"
    names = fork_rules.names(prefix, request.count, {guest.name for _, guest in found[0]})
    return await forks.start(host, opened, family, names, caller, folder=request.folder)


async def _open_host(inventory: Inventory, name: str) -> Host:
    """Return a host on which guests may be placed. Raises InventoryError, Blocked."""
    host = inventory.host(name)
    await asyncio.to_thread(maintenance.refuse, host.name)
    return host


async def _taken(
    controller: Controller, at: tuple[Host, Guest], place: StorePlace, family: str,
    identity: Identity | None,
) -> str:  # fmt: skip
    """Take a snapshot of a running guest for a family. Returns the snapshot's ID."""
    host, guest = at
    if not guest.state.is_active:
        raise BadInput(
            f"{guest.name} is {guest.state.in_words} on {host.name}, so it has no memory from"
            " which forks could continue",
            hint="start the guest, or name one of its snapshots (vmckpt snapshot list)",
        )
    await asyncio.gather(
        asyncio.to_thread(stores.require_key, identity), asyncio.to_thread(jobs.load)
    )
    request = TakeRequest(guest=guest.uuid, tags={fork_rules.TAG: family})
    taken = await create.take(
        at, place, stores.keyring(), request, controller.caller, hosts=controller.inventory.hosts
    )
    for warning in taken.warnings:
        controller.caller.warn(f"warning: {warning}")
    return taken.id


def _snapshot(
    inventory: Inventory, store: str | None, request: ForkRequest, found: fleet.FoundGuests,
    identity: Identity | None,
) -> Opened:  # fmt: skip
    """Open the snapshot that the request names.

    If there is no such snapshot, raises HostUnreachable if a host may have a guest of this name,
    otherwise NotInStore.
    """
    try:
        return snapshot_restore.opened_anywhere(inventory, store, request.source, identity)
    except NotInStore as exc:
        if found[1]:
            fleet.find(inventory, request.source, found)
        raise NotInStore(
            f"no host has a guest {request.source!r}, and {exc.message}",
            hint="run vmckpt guests or vmckpt snapshot list",
        ) from exc


async def tree(inventory: Inventory) -> ForkTree:
    """Return the families of all hosts, and the errors of the hosts that did not answer."""

    async def one(host: Host) -> tuple[Family, ...] | str:
        try:
            return await forks.families(host)
        except VmckptError as exc:
            return exc.message

    answers = await asyncio.gather(*map(one, inventory.hosts.values()))
    told = dict(zip(inventory.hosts, answers, strict=True))
    # A host with two names in the inventory reports its families twice.
    found = {
        family.id: family
        for answer in reversed(answers) if not isinstance(answer, str)
        for family in answer
    }  # fmt: skip
    families = sorted(found.values(), key=lambda one: (one.template, one.host, one.id))
    errors = {name: answer for name, answer in told.items() if isinstance(answer, str)}
    return ForkTree(families=tuple(families), errors=errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Doomed:
    """The forks that `drop` destroys."""

    tree: ForkTree
    families: tuple[Family, ...]
    """The families of these forks, each with only these forks."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the forks."""
        return tuple(fork.name for one in self.families for fork in one.forks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """The forks that were dropped, and the snapshots that were deleted with their last fork."""

    forks: tuple[str, ...]
    """Names of the forks."""
    snapshots: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"dropped": list(self.forks), "deleted_snapshots": list(self.snapshots)}


async def doomed(inventory: Inventory, words: Sequence[str], family: str | None) -> Doomed:
    """Find the forks to drop: named forks (by name or UUID), and the forks of a family.

    Raises ReadOnly, NotPermitted, HostUnreachable, and BadInput if a guest is not a fork.
    """
    named = [*words, *([family] if family is not None else [])]
    permission.require(inventory, "fork drop", names=named)
    if not named:
        raise BadInput("no fork is named", hint="name forks, or a family with --family")
    known = await tree(inventory)
    return Doomed(tree=known, families=fork_rules.chosen(known, words, family))


async def drop(controller: Controller, plan: Doomed) -> Dropped:
    """Destroy forks and remove their disks.

    Also deletes each snapshot that was taken for a family and that no fork uses any more. Raises
    VmckptError if a host fails; the forks on the other hosts are dropped all the same.
    """
    inventory = controller.inventory
    uuids: dict[str, list[str]] = {}
    for family in plan.families:
        uuids.setdefault(family.host, []).extend(one.uuid for one in family.forks)
    answers = await asyncio.gather(
        *(forks.drop(inventory.host(host), which) for host, which in uuids.items()),
        return_exceptions=True,
    )
    failed = {host for host, one in zip(uuids, answers, strict=True) if one is not None}
    gone = fork_rules.complete(plan.tree, plan.families)
    left = [family for family in gone if family.host not in failed]
    if left and plan.tree.errors:
        ids = ", ".join(dict.fromkeys(one.snapshot for one in left))
        controller.caller.warn(
            f"warning: {ids} may have been the snapshot of other forks and was not deleted; no"
            f" answer from {silent_hosts(plan.tree.errors)}"
        )
    deleted = [
        id_ for store, id_ in fork_rules.unused(plan.tree, left)
        if await _delete_unused(controller, store, id_)
    ]  # fmt: skip
    for answer in answers:
        if answer is not None:
            raise answer
    return Dropped(forks=plan.names, snapshots=tuple(deleted))


async def _delete_unused(controller: Controller, store: str, id_: str) -> bool:
    """Delete a snapshot if it was taken for a family. Returns whether it was deleted."""

    def made_for_forks(place: StorePlace) -> bool:
        public = catalog.readable(stores.open_place(place), [id_]).get(id_)
        return public is not None and fork_rules.TAG in public.tags

    try:
        place = controller.inventory.store(store)
        if not await asyncio.to_thread(made_for_forks, place):
            return False
    except VmckptError as exc:
        controller.caller.warn(f"warning: {id_} was not deleted: {exc.message}")
        return False
    return await _delete(controller, place, id_)


async def _delete(controller: Controller, place: StorePlace, id_: str) -> bool:
    """Delete a snapshot that was taken for a family. Returns whether it was deleted.

    The snapshot is pinned until the server of its family has ended.
    """
    give_up = time.monotonic() + _RELEASED_IN
    while True:
        try:
            await asyncio.to_thread(lambda: stores.open_place(place).delete(id_))
        except BadInput as exc:
            if time.monotonic() < give_up:
                await asyncio.sleep(_TURN)
                continue
            why = exc.message
        except VmckptError as exc:
            why = exc.message
        else:
            return True
        controller.caller.warn(
            f"warning: {id_} was not deleted: {why}; run vmckpt snapshot delete {id_} --store"
            f" {place.name}"
        )
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A fork that became independent of its family."""

    fork: Fork
    host: str
    family: str
    unused: str | None
    """ID of the snapshot of the family if the fork was the last that used it; None otherwise."""

    def as_json(self) -> dict[str, Any]:
        return {
            "kept": self.fork.name, "uuid": self.fork.uuid, "host": self.host,
            "family": self.family, "unused_snapshot": self.unused,
        }  # fmt: skip


async def keep(controller: Controller, word: str) -> Kept:
    """Make a fork (by name or UUID) independent of its family: copy all its memory and disks.

    Raises ReadOnly, NotPermitted, HostUnreachable, BadInput if the guest is not a fork, Cancelled
    if `caller.stop` was set, and the errors of the agent.
    """
    inventory = controller.inventory
    permission.require(inventory, "fork keep", names=[word])
    known = await tree(inventory)
    (family,) = fork_rules.chosen(known, [word], None)
    (fork,) = family.forks
    await forks.keep(inventory.host(family.host), fork.uuid, controller.caller)
    left = fork_rules.unused(known, fork_rules.complete(known, [family]))
    return Kept(
        fork=fork, host=family.host, family=family.id,
        unused=family.snapshot if left else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A request to run a command for each fork of a new family."""

    command: str
    """Shell command; `{}` stands for the name of the fork."""
    parallel: int
    """How many commands run at a time."""
    keep: Keep = Keep.BEST


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The results of the commands that were run for the forks of a family."""

    ran: tuple[Ran, ...]
    """In the order in which the commands ended."""
    best: str | None
    """Name of the fork whose command did best; None if no command succeeded."""
    kept: tuple[str, ...]
    """Names of the forks that are still running."""
    dropped: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "best": self.best, "kept": list(self.kept), "dropped": list(self.dropped),
            "commands": [one.as_json() for one in self.ran],
        }  # fmt: skip


async def run(
    controller: Controller, started: Started, request: RunRequest, ended: Callable[[Ran], None]
) -> RunResult:
    """Run a command on this machine for each fork, and drop all forks except the best.

    `ended` is called with each result. If `caller.stop` is set, the commands are ended, all forks
    are dropped, and Cancelled is raised. Raises VmckptError if forks cannot be dropped.
    """
    stop, names = controller.caller.stop, tuple(one.name for one in started.running)
    commands = [
        ForkCommand(
            name=one.name, command=fork_rules.command_for(request.command, one.name),
            environment=fork_rules.environment(
                name=one.name, uuid=one.uuid, host=started.host, family=started.family
            ),
        )
        for one in started.running
    ]  # fmt: skip
    ran = await fork_commands.run_all(commands, request.parallel, stop, ended)
    if stop.is_set():
        await _drop_of(controller, started, names)
        raise Cancelled(f"stopped; the commands were ended, and {len(names)} forks were dropped")
    best = fork_rules.best(ran)
    kept = names if request.keep is Keep.ALL else tuple(one for one in names if one == best)
    dropped = tuple(one for one in names if one not in kept)
    if dropped:
        await _drop_of(controller, started, dropped)
    return RunResult(ran=ran, best=best, kept=kept, dropped=dropped)


async def _drop_of(controller: Controller, started: Started, names: Sequence[str]) -> None:
    """Drop forks of a family that this command has started."""
    family = started.as_family()
    found = await tree(controller.inventory)
    others = tuple(one for one in found.families if one.id != family.id)
    known = ForkTree(families=(*others, family), errors=found.errors)
    parts = fork_rules.chosen(ForkTree(families=(family,)), names, None)
    try:
        await drop(controller, Doomed(tree=known, families=parts))
    except VmckptError:
        controller.caller.warn(
            f"not all forks were dropped; run vmckpt fork drop --family {started.family}"
        )
        raise
