"""Create a snapshot: the controller's part. An agent on the guest's host does the work.

After a migration, the state that the next incremental snapshot needs is fetched from the old host.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vmckpt.agent import client
from vmckpt.agent.orders import CreateOrder, LineOrder
from vmckpt.agent.protocol import error_as_json
from vmckpt.agent.results import CreateResult
from vmckpt.errors import BadInput, GuestLocked, VmckptError
from vmckpt.journal import controller_identity, jobs
from vmckpt.journal.cancel_requests import cancellable_job
from vmckpt.journal.recorder import JournalStepLog, Recorder, recorded
from vmckpt.journal.records import NewOperation, Operation
from vmckpt.model.disk import StorePlace
from vmckpt.model.events import Caller, Event
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Phase
from vmckpt.snapshot.group.barrier import Cutting
from vmckpt.snapshot.request import NOTED, Step, Taken, TakeRequest
from vmckpt.store import repository
from vmckpt.store.format import manifest
from vmckpt.store.format.metadata import Labels, Word, new_id
from vmckpt.store.keys.keyring import Keyring
from vmckpt.units import Seconds

_SILENCE = Seconds(30.0)
"""Time without an answer from a host after which the transfer of parent state is given up."""


def left_behind(past: Sequence[Operation], store: str, here: str) -> tuple[str, str] | None:
    """Return the other host that has a guest's parent state, and the guest's last snapshot. Pure.

    `past` are the guest's snapshots in the journal, latest first; `here` is the host on which the
    guest is running now. Returns None if the last snapshot was taken here, if its host or ID is
    unknown, or if this store has no snapshot of the guest.
    """
    for one in past:
        if one.outcome != Outcome.COMPLETED or one.detail.get("store") != store:
            continue
        id_ = (one.report or {}).get("id")
        if one.source is None or one.source == here or not isinstance(id_, str):
            return None
        return one.source, id_
    return None


async def fetch_parent_state(
    old: Host, new: Host, guest: str, store: str, snapshot: str
) -> str | None:
    """Copy a guest's parent state from one host to another.

    `guest`: the guest's UUID; `store`: the store's name; `snapshot`: ID of the snapshot whose state
    is copied. Returns None on success, else the reason for the failure. Without the parent state,
    the next snapshot is just as complete, but has to read the entire guest.
    """
    try:
        moved = await _Carriage(old, new).carried(guest, store, snapshot)
    except TimeoutError:
        return f"{old.name} did not answer within {_SILENCE:g} s"
    except VmckptError as exc:
        return exc.message
    return None if moved else f"{old.name} no longer has the guest's parent state"


class _Carriage:
    """A transfer of parent state between the agents of two hosts."""

    def __init__(self, old: Host, new: Host) -> None:
        self._old, self._new = old, new
        self._pieces: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(2)
        self._kept: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def carried(self, guest: str, store: str, snapshot: str) -> bool:
        """Run the transfer. Returns whether the new host has the state.

        Raises VmckptError, TimeoutError.
        """

        def order(host: Host, *, gives: bool) -> dict[str, Any]:
            return LineOrder(
                gives=gives, guest=guest, store=store, state=host.agent_state, snapshot=snapshot
            ).as_json()

        giving = asyncio.create_task(
            _carried_out(self._old, order(self._old, gives=True), self._given)
        )
        taking = asyncio.create_task(
            _carried_out(self._new, order(self._new, gives=False), self._taken)
        )
        taking.add_done_callback(self._came)
        both = (giving, taking)
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
            for one in done:
                one.result()
            return bool(taking.result()["moved"])
        finally:
            for one in both:
                one.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _given(self, asked: str, about: Mapping[str, Any]) -> dict[str, Any]:
        if asked == "piece":
            await self._pieces.put(dict(about))
            return {"answer": True}
        await self._pieces.put(None)
        return {"answer": await self._kept}

    async def _taken(self, asked: str, _: Mapping[str, Any]) -> dict[str, Any]:
        del asked
        async with asyncio.timeout(_SILENCE):
            return {"answer": await self._pieces.get()}

    def _came(self, taking: "asyncio.Task[dict[str, Any]]") -> None:
        if not self._kept.done():
            fine = not taking.cancelled() and taking.exception() is None
            self._kept.set_result(fine and bool(taking.result()["moved"]))


async def _carried_out(host: Host, order: dict[str, Any], answer: client.Answer) -> dict[str, Any]:
    return await client.run_order(host, order, _unheard, asyncio.Event(), answer)


def _unheard(_: Event) -> None:
    pass


_WORD: TypeAdapter[str] = TypeAdapter(Word)
_LABELS: TypeAdapter[Mapping[str, str]] = TypeAdapter(Labels)


async def take(
    found: tuple[Host, Guest],
    store: StorePlace,
    keys: Keyring,
    request: TakeRequest,
    caller: Caller,
    *,
    hosts: Mapping[str, Host],
) -> Taken:
    """Take a snapshot of a guest and store it. `found` is the guest with its host.

    `hosts` are the hosts on which the guest may have run before; its parent state is fetched from
    there. Setting `caller.stop` cancels the snapshot: the guest stays unchanged, nothing is added
    to the store, and Cancelled is raised. Raises VmckptError.
    """
    host, guest = found
    check_words(request)
    require_capturable(guest, host, memory=request.memory)
    new = operation(host, store, guest, request)
    async with (
        client.shared_logins(host),
        recorded(new, guest.uuid, caller.warn) as recorder,
        cancellable_job(recorder, caller) as mine,
    ):
        late = await follow(host, store, guest, hosts)
        taken = await SnapshotSession(host, store, keys, mine, recorder).run(guest, request)
        taken = replace(taken, warnings=(*late, *taken.warnings))
        recorder.finish(Outcome.COMPLETED, taken.as_json())
        return taken


async def follow(
    host: Host, store: StorePlace, guest: Guest, hosts: Mapping[str, Host]
) -> tuple[str, ...]:
    """Fetch the guest's parent state if it is on another host. Returns a warning if that fails."""
    past = await asyncio.to_thread(jobs.past_snapshots, guest.uuid)
    found = left_behind(past, store.name, host.name)
    if found is None or found[0] not in hosts:
        return ()
    old, snapshot = found
    why = await fetch_parent_state(hosts[old], host, guest.uuid, store.name, snapshot)
    if why is None:
        return ()
    return (
        f"reading all of {guest.name}, not only its changes: the last snapshot was taken on {old},"
        f" and {why}",
    )


def require_capturable(guest: Guest, host: Host, *, memory: bool = True) -> None:
    """Check that a snapshot of a guest can be taken now.

    `memory`: whether it includes the memory. Raises BadInput, GuestLocked.
    """
    if memory and not guest.state.is_active:
        raise BadInput(
            f"{guest.name} is {guest.state.in_words} on {host.name}, so its memory cannot be"
            " captured",
            hint="start the guest, or, if it is not in a group, omit its memory with --no-memory",
        )
    if guest.job is not None:
        raise GuestLocked(
            f"guest {guest.name} on {host.name} is locked by a job: {guest.job}; nothing was"
            " changed",
            hint="try again when the job has ended",
        )


def check_words(request: TakeRequest) -> None:
    """Check a snapshot's name and tags. Raises BadInput if they are invalid in a manifest."""
    try:
        _WORD.validate_python(request.name or "")
        _LABELS.validate_python(dict(request.tags))
    except ValidationError as exc:
        raise BadInput(
            f"the name and tags of a snapshot may have at most 255 printable characters each:"
            f" {exc.errors()[0]['msg']}",
            hint="use a shorter name or tag, without control characters",
        ) from exc


def named_now() -> str:
    """Return the default name of a snapshot: the current time."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def where(guest: Guest, host: Host) -> str:
    """Return the label of a group's member, such as "web1 on alpha"."""
    return f"{guest.name} on {host.name}"


def operation(host: Host, store: StorePlace, guest: Guest, request: TakeRequest) -> NewOperation:
    """Return the snapshot's operation for the journal."""
    return NewOperation(
        kind="snapshot",
        guest=guest.name,
        guest_uuid=guest.uuid,
        source=host.name,
        detail={"store": store.name, "name": request.name, "memory": request.memory},
    )


class SnapshotSession:
    """A snapshot that is being taken."""

    def __init__(
        self,
        host: Host,
        store: StorePlace,
        keys: Keyring,
        caller: Caller,
        recorder: Recorder,
        *,
        cut: Cutting | None = None,
    ) -> None:
        """Prepare a snapshot; `cut` is the group snapshot that it is part of."""
        self._host, self._store, self._keys, self._cut = host, store, keys, cut
        self._caller, self._recorder = caller, recorder
        self._step_log = JournalStepLog(recorder)
        self._where = ""
        self._unsigned: str | None = None
        """ID of the snapshot whose manifest may still be signed; None once it was signed."""

    async def run(self, guest: Guest, request: TakeRequest) -> Taken:
        """Send the snapshot order to the agent, and wait for its result. Raises VmckptError."""
        order = await asyncio.to_thread(self._order, guest, request)
        self._unsigned = order.snapshot
        meant = {
            "snapshot": order.snapshot,
            "store": order.store.name,
            "url": order.store.url,
            "id": order.store.id,
            "state": order.state,
        }
        self._where = where(guest, self._host)
        await self._step_log.intend(Step.TAKE, meant)
        stop = self._caller.stop if self._cut is None else self._cut.stop
        told = await client.run_order(self._host, order.as_json(), self._emit, stop, self._answer)
        with client.sensible(self._host):
            made = CreateResult.parse(told)
        return Taken(
            id=order.snapshot, name=order.name, guest=guest.name, host=self._host.name,
            store=self._store.name, pause=made.pause, way=made.way, why=made.why,
            phases=made.phases, took=made.took, read=made.read, same=made.same, zero=made.zero,
            written=made.written, encrypted=order.salt is not None,
            warnings=tuple(made.warnings), group=order.group, held=made.held,
            job=self._recorder.id,
        )  # fmt: skip

    def _order(self, guest: Guest, request: TakeRequest) -> CreateOrder:
        encrypts, fence = self._keys.encrypts, self._recorder.fence
        if encrypts:
            self._keys.sealing()  # creates the salt if there is none yet
        salt = self._keys.salt() if encrypts else None
        return CreateOrder(
            guest=guest.uuid,
            uri=client.LIBVIRT,
            host=self._host.name,
            store=repository.identified(self._store),
            state=self._host.agent_state,
            snapshot=new_id(secrets.token_bytes(10)),
            name=request.name or named_now(),
            by=controller_identity.asked_by(),
            owner="" if fence is None else f"{fence.resource}#{fence.token}",
            memory=request.memory,
            tags=dict(request.tags),
            group=None if self._cut is None else self._cut.id,
            salt=None if salt is None else salt.hex(),
            admins=tuple(admin.key.hex() for admin in self._keys.admins()) if encrypts else (),
            signer=self._keys.signing().public.hex(),
            way=request.way,
        )

    async def _answer(self, asked: str, about: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._step_log.check()
            if asked == "intend" and about.get("step") in NOTED:
                await self._step_log.intend(str(about["step"]), {"facts": str(about["facts"])})
                return {"answer": True}
            if asked == "cut" and self._cut is not None:
                await self._cut.reached(self._where, Phase(str(about["phase"])))
                return {"answer": True}
            if asked == "sign" and self._unsigned is not None:
                message = bytes.fromhex(str(about["message"]))
                # Only the ordered snapshot is signed, and only once, so a host cannot get a
                # snapshot of another guest signed.
                if manifest.is_for(message, self._unsigned):
                    self._unsigned = None
                    if self._cut is not None:
                        await self._cut.reached(self._where, Phase.STORED)
                    return {"answer": self._keys.signing().sign(message).hex()}
        except VmckptError as exc:
            return {"refused": str(exc), "error": error_as_json(exc)}
        except (KeyError, ValueError):
            pass
        return {
            "refused": f"the agent on {self._host.name} sent a request that is invalid or does not"
            " belong to this snapshot"
        }

    def _emit(self, event: Event) -> None:
        self._recorder.take(event)
        self._caller.emit(event)
