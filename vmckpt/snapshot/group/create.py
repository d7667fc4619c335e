"""Create the snapshots of a group at one instant, of guests on any hosts.

Each guest has its own operation in the journal and its own lease, so each is recovered by itself:
its output is let go and it runs. All are published or none, while the controller lives. A group
that a crash left half published is reported as incomplete, and its members stay good snapshots of
their guests: before they could be deleted it would have to be certain that no host, which may not
answer now, will publish the rest.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from vmckpt.errors import BadInput, Cancelled, NotInStore, RemoteError, StoreError, VmckptError
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
    """Makes one, by the name of a member, who hears of it; `caller` is told of all together."""
    progress: dict[str, Copied] = {}

    def of(name: str) -> Caller:
        def emit(event: Event) -> None:
            if isinstance(event, Copied):
                progress[name] = event
                caller.emit(rules.together(list(progress.values())))

        return replace(caller, emit=emit)

    return of


_GRACE = Seconds(40.0)
"""How long an agent may take to put its guest back; QEMU 7.2 sends all of a memory first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTaken:
    """A cut that is in the store."""

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
    """Take a snapshot of several guests, each found on a host, as one cut, and put it into a store.

    Raises as `snapshot.create.take`; then all guests go on, and nothing of it is in the store, or
    the error says what is.
    """
    if not request.memory:
        raise BadInput("a group is captured with its memory", hint="leave --no-memory out")
    create.check_words(request)
    name = request.name or create.named_now()
    tags = {**request.tags, rules.SIZE: str(len(places))}
    async with AsyncExitStack() as stack:
        members = []
        # Everybody takes several leases in the same order, so no two wait for each other.
        for host, guest in sorted(_different(places), key=lambda one: one[1].uuid):
            mine = replace(request, guest=guest.uuid, name=name, tags=tags)
            new = create.operation(host, store, guest, mine)
            recorder = await stack.enter_async_context(recorded(new, guest.uuid, caller.warn))
            late = await create.follow(host, store, guest, hosts)
            members.append(
                _Member(host=host, guest=guest, request=mine, late=late, recorder=recorder)
            )
        return await _Group(members, store, keys, caller).take()


def _different(places: Sequence[tuple[Host, Guest]]) -> Sequence[tuple[Host, Guest]]:
    """Raises BadInput, GuestLocked if they cannot be captured together."""
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
    """One cut that is being taken."""

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
        """Raises VmckptError."""
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
        """Once one has failed, the others have so long to put their guests back."""
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
        """What is to be raised, with everything told that is known."""
        unexpected = [
            one
            for one in ended
            if isinstance(one, BaseException)
            and not isinstance(one, VmckptError | asyncio.CancelledError)
        ]
        if unexpected:
            return unexpected[0]
        error = self._cut.failure or Cancelled("the snapshot of the group was stopped")
        stayed = await asyncio.to_thread(self._unpublished, taken)
        note = f"; {', '.join(stayed)} could not be deleted again" if stayed else ""
        unknown = [
            member.name
            for member, one in zip(self._members, ended, strict=True)
            if isinstance(one, RemoteError | asyncio.CancelledError)
            or (isinstance(one, VmckptError) and not one.undone)
        ]
        if not unknown:
            if note:
                return StoreError(error.message + note, hint="vmckpt snapshot delete")
            return error
        # Only those of which nobody knows are left to recovery.
        outcome = Outcome.CANCELLED if isinstance(error, Cancelled) else Outcome.FAILED
        for member in self._members:
            if member.name not in unknown:
                member.recorder.finish(outcome, {"error": str(error)})
        return RemoteError(
            f"{error.message}; how it ended for {' and '.join(unknown)} is not known{note}",
            hint="run vmckpt recover",
        )

    def _unpublished(self, taken: Sequence[Taken]) -> list[str]:
        """All or none: delete what is in the store already; those that stayed."""
        stayed = []
        for one in taken:
            try:
                Store.open(backend_of(self._store.url)).delete(one.id)
            except NotInStore:
                continue
            except VmckptError:
                stayed.append(one.id)
        return stayed
