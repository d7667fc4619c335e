"""Create snapshots of a group of guests, on any hosts, at one instant.

Each guest has its own operation in the journal and its own lease, so it is recovered independently:
its output is released and it resumes. As long as the controller is alive, either all snapshots are
published or none. After a crash, only part of a group may be published. The group is then reported
as incomplete, and its members remain good snapshots of their guests. The members are not deleted
automatically, because a host that does not answer now may still publish the rest.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from vmckpt.errors import BadInput, Cancelled, NotInStore, RemoteError, StoreError, VmckptError
from vmckpt.journal.cancel_requests import answered, stop_requested
from vmckpt.journal.recorder import Recorder, recorded
from vmckpt.model.disk import StorePlace
from vmckpt.model.events import Caller, Copied, Event
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.snapshot import create
from vmckpt.snapshot.group import rules
from vmckpt.snapshot.group.barrier import Cutting
from vmckpt.snapshot.request import Taken, TakeRequest
from vmckpt.store.backend.factory import backend_of
from vmckpt.store.format.metadata import new_id
from vmckpt.store.keys.keyring import Keyring
from vmckpt.store.repository import Store
from vmckpt.units import Seconds


def listening(caller: Caller) -> Callable[[str], Caller]:
    """Return a function that makes a caller for each member's name.

    These callers combine the progress of all members and report it to `caller`.
    """
    progress: dict[str, Copied] = {}

    def of(name: str) -> Caller:
        def emit(event: Event) -> None:
            if isinstance(event, Copied):
                progress[name] = event
                caller.emit(rules.together(list(progress.values())))

        return replace(caller, emit=emit)

    return of


_GRACE = Seconds(40.0)
"""How long an agent may take to undo its capture; QEMU 7.2 sends all memory first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTaken:
    """A group snapshot that was taken and stored."""

    id: str
    members: tuple[Taken, ...]

    def as_json(self) -> dict[str, Any]:
        return {"group": self.id, "members": [one.as_json() for one in self.members]}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    host: Host
    guest: Guest
    request: TakeRequest
    late: tuple[str, ...] = ()
    recorder: Recorder

    @property
    def name(self) -> str:
        return create.where(self.guest, self.host)


async def take(
    places: Sequence[tuple[Host, Guest]],
    store: StorePlace,
    keys: Keyring,
    request: TakeRequest,
    caller: Caller,
    *,
    hosts: Mapping[str, Host],
) -> GroupTaken:
    """Take consistent snapshots of several guests, each with its host, and store them.

    Raises the errors of `snapshot.create.take`. After an error, all guests keep running, and the
    store has no snapshot of the group unless the error reports one.
    """
    if not request.memory:
        raise BadInput("a group snapshot always includes memory", hint="omit --no-memory")
    create.check_words(request)
    name = request.name or create.named_now()
    tags = {**request.tags, rules.SIZE: str(len(places))}
    async with AsyncExitStack() as stack:
        members = []
        caller = replace(caller, stop=await stack.enter_async_context(stop_requested(caller.stop)))
        # All controllers take leases in the same order, which prevents deadlocks.
        for host, guest in sorted(_different(places), key=lambda one: one[1].uuid):
            mine = replace(request, guest=guest.uuid, name=name, tags=tags)
            new = create.operation(host, store, guest, mine)
            recorder = await stack.enter_async_context(recorded(new, guest.uuid, caller.warn))
            await stack.enter_async_context(answered(recorder, caller.stop))
            late = await create.follow(host, store, guest, hosts)
            members.append(
                _Member(host=host, guest=guest, request=mine, late=late, recorder=recorder)
            )
        return await _Group(members, store, keys, caller).take()


def _different(places: Sequence[tuple[Host, Guest]]) -> Sequence[tuple[Host, Guest]]:
    """Check that guests can be captured together. Raises BadInput, GuestLocked."""
    found: set[str] = set()
    for host, guest in places:
        create.require_capturable(guest, host)
        if guest.uuid in found:
            raise BadInput(f"--group names {guest.name} twice")
        found.add(guest.uuid)
    return places


async def _ended(tasks: Sequence["asyncio.Task[Taken]"]) -> bool:
    await asyncio.wait(tasks)
    return True


class _Group:
    """A group snapshot that is being taken."""

    def __init__(
        self, members: Sequence[_Member], store: StorePlace, keys: Keyring, caller: Caller
    ) -> None:
        self._members, self._store, self._keys = members, store, keys
        self._id = new_id(secrets.token_bytes(10), "g")
        names = frozenset(member.name for member in members)
        self._cut = Cutting(self._id, names, caller.stop)
        caller_of = listening(caller)
        self._takings = [
            create.SnapshotSession(
                one.host, store, keys, caller_of(one.name), one.recorder, cut=self._cut
            )
            for one in members
        ]

    async def take(self) -> GroupTaken:
        """Take the snapshots. Raises VmckptError."""
        async with self._cut:
            tasks = [asyncio.create_task(self._one(i)) for i in range(len(self._members))]
            try:
                await self._all_ended(tasks)
            finally:
                for task in tasks:
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
        taken = tuple(one for one in ended if isinstance(one, Taken))
        if len(taken) == len(self._members):
            for member, one in zip(self._members, taken, strict=True):
                member.recorder.finish(Outcome.COMPLETED, one.as_json())
            return GroupTaken(id=self._id, members=taken)
        raise await self._failed(ended, taken)

    async def _one(self, index: int) -> Taken:
        member = self._members[index]
        try:
            taken = await self._takings[index].run(member.guest, member.request)
        except VmckptError as exc:
            await self._cut.fail(exc)
            raise
        except BaseException:
            await self._cut.fail(Cancelled(f"{member.name} was not captured"))
            raise
        return replace(taken, warnings=(*member.late, *taken.warnings))

    async def _all_ended(self, tasks: Sequence["asyncio.Task[Taken]"]) -> None:
        """Wait for all agents; at most `_GRACE` seconds after a failure or cancellation."""
        gave_up = asyncio.create_task(self._cut.stop.wait())
        whole = asyncio.create_task(_ended(tasks))
        try:
            await asyncio.wait((whole, gave_up), return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                await asyncio.wait((whole,), timeout=_GRACE)
        finally:
            gave_up.cancel()
            whole.cancel()

    async def _failed(
        self, ended: Sequence[Taken | BaseException], taken: Sequence[Taken]
    ) -> BaseException:
        """Delete the published snapshots. Returns the error to raise.

        If the outcome of a member is unknown, the outcomes of the other members are recorded.
        """
        stayed = await asyncio.to_thread(self._unpublished, taken)
        note = f"; could not delete {', '.join(stayed)} from the store" if stayed else ""
        unexpected = [
            one
            for one in ended
            if isinstance(one, BaseException)
            and not isinstance(one, VmckptError | asyncio.CancelledError)
        ]
        if unexpected:
            if note:
                unexpected[0].add_note(f"the group snapshot failed{note}")
            return unexpected[0]
        error = self._cut.failure or Cancelled("the group snapshot was stopped")
        unknown = [
            member.name
            for member, one in zip(self._members, ended, strict=True)
            if isinstance(one, RemoteError | asyncio.CancelledError)
            or (isinstance(one, VmckptError) and not one.undone)
        ]
        if not unknown:
            if note:
                at = self._store.name
                return StoreError(
                    error.message + note,
                    hint=f"run vmckpt snapshot delete {' '.join(stayed)} --store {at}",
                )
            return error
        # Only members with an unknown outcome are left to recovery.
        outcome = Outcome.CANCELLED if isinstance(error, Cancelled) else Outcome.FAILED
        for member in self._members:
            if member.name not in unknown:
                member.recorder.finish(outcome, {"error": str(error)})
        left = RemoteError(
            f"{error.message}; the outcome for {' and '.join(unknown)} is unknown{note}",
            hint="run vmckpt recover",
        )
        left.undone = False
        return left

    def _unpublished(self, taken: Sequence[Taken]) -> list[str]:
        """Delete the snapshots that were published. Returns the IDs that could not be deleted."""
        stayed = []
        for one in taken:
            try:
                Store.open(backend_of(self._store.url)).delete(one.id)
            except NotInStore:
                continue
            except VmckptError:
                stayed.append(one.id)
        return stayed
