"""Restoring a snapshot: the controller's part. The work is done by an agent on the chosen host."""

import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from vmckpt.agent.orders import RestoreOrder
from vmckpt.errors import BadInput, GuestBusy, VmckptError
from vmckpt.hypervisor import facts as host_facts
from vmckpt.hypervisor import guests
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import NewOperation
from vmckpt.journal.steps import JournalDesk
from vmckpt.model.callers import Caller
from vmckpt.model.events import Event
from vmckpt.model.findings import Severity
from vmckpt.model.hosts import Host
from vmckpt.model.jobs import Outcome
from vmckpt.model.stores import StorePlace
from vmckpt.snapshot import agents, compatible, reborn, session
from vmckpt.snapshot.compatible import Side
from vmckpt.snapshot.recording import recorded
from vmckpt.snapshot.requests import Restored, RestoreRequest
from vmckpt.snapshot.steps import Step
from vmckpt.store.facts import Contents, Public
from vmckpt.store.inside import Private
from vmckpt.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A snapshot that was read."""

    store: StorePlace
    public: Public
    private: Private
    data_key: bytes | None
    trusted: frozenset[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is started, and where its disks go."""

    guest: str
    uuid: str
    xml: str
    images: dict[str, str]


async def restore(host: Host, opened: Opened, request: RestoreRequest, caller: Caller) -> Restored:
    """Bring a snapshot back on a host.

    Setting `caller.stop` gives it up until the guest is started. Raises Cancelled then, and
    VmckptError; nothing is left of it.
    """
    plan = planned(opened, request)
    async with Hypervisor(host) as hypervisor:
        warnings = await _checked(hypervisor, opened)
        new = _operation(host, opened, plan)
        async with recorded(new, plan.uuid, caller.warn) as recorder:
            ends = await _in_the_way(hypervisor, plan, request)
            work = _Restoring(hypervisor, opened, request, caller, recorder)
            restored = await work.run(plan, warnings, ends)
            recorder.finish(Outcome.COMPLETED, restored.as_json())
            return restored


def planned(opened: Opened, request: RestoreRequest) -> _Plan:
    """What the guest becomes. Raises BadInput."""
    facts, public = opened.private.facts, opened.public
    try:
        images = {one.target: _image(facts.domain_xml, one.target, request) for one in facts.disks}
        if request.fork is None:
            xml = reborn.as_itself(facts.domain_xml, images)
            return _Plan(guest=public.guest, uuid=public.guest_uuid, xml=xml, images=images)
        macs = [_new_mac() for _ in range(reborn.cards(facts.domain_xml))]
        own = str(uuid.uuid4())
        xml = reborn.as_fork(
            facts.domain_xml, images, name=request.fork, uuid=own, macs=macs,
            link_up=request.link_up,
        )  # fmt: skip
    except ValueError as exc:
        raise BadInput(f"snapshot {public.id}: its guest makes no sense: {exc}") from exc
    return _Plan(guest=request.fork, uuid=own, xml=xml, images=images)


def _image(xml: str, target: str, request: RestoreRequest) -> str:
    """Where a disk goes: to its own place, or under the fork's name."""
    path = PurePosixPath(reborn.image_of(xml, target))
    if request.fork is None:
        return str(path)
    folder = PurePosixPath(request.folder) if request.folder else path.parent
    return str(folder / f"{request.fork}-{target}{path.suffix}")


def _new_mac() -> str:
    """One of QEMU's, that nobody else has."""
    return "52:54:00:" + ":".join(f"{byte:02x}" for byte in secrets.token_bytes(3))


async def _checked(hypervisor: Hypervisor, opened: Opened) -> tuple[str, ...]:
    """Whether the host can run it; warnings. Raises BadInput with all reasons against it."""
    host = hypervisor.host.name
    side = Side(host=host, facts=await host_facts.host_facts(hypervisor))
    private = opened.private
    found = compatible.check(opened.public, private.facts, private.files, side)
    against = [one.text for one in found if one.severity is Severity.BLOCKER]
    if against:
        raise BadInput(f"{opened.public.id} cannot be restored on {host}: {'; '.join(against)}")
    return tuple(one.text for one in found if one.severity is Severity.WARNING)


async def _in_the_way(hypervisor: Hypervisor, plan: _Plan, request: RestoreRequest) -> bool:
    """Whether a guest must be ended for it. Raises GuestBusy, BadInput if none may be."""
    guest = await guests.find_guest(hypervisor, plan.uuid)
    if request.fork is not None:
        if await guests.find_guest(hypervisor, plan.guest) is not None:
            raise BadInput(
                f"{hypervisor.host.name} has a guest {plan.guest} already",
                mend="choose another name with --as",
            )
        return False
    if guest is None or not guest.state.is_active:
        return False
    if not request.end_running:
        raise GuestBusy(
            f"{guest.name} runs on {hypervisor.host.name}; nothing was changed",
            mend="shut it down, or say --replace to end it and put the snapshot in its place",
        )
    return True


def _operation(host: Host, opened: Opened, plan: _Plan) -> NewOperation:
    return NewOperation(
        kind="restore",
        guest=plan.guest,
        guest_uuid=plan.uuid,
        source=host.name,
        detail={"store": opened.store.name, "snapshot": opened.public.id},
    )


class _Restoring:
    """One restore under way."""

    def __init__(
        self, hypervisor: Hypervisor, opened: Opened, request: RestoreRequest, caller: Caller,
        recorder: Recorder,
    ) -> None:  # fmt: skip
        self._hypervisor, self._opened, self._request = hypervisor, opened, request
        self._host = hypervisor.host
        self._caller, self._recorder = caller, recorder
        self._desk = JournalDesk(recorder)

    async def run(self, plan: _Plan, warnings: tuple[str, ...], ends: bool) -> Restored:
        opened, desk = self._opened, self._desk
        order = RestoreOrder(
            guest=plan.uuid,
            uri=agents.LIBVIRT,
            host=self._host.name,
            store=opened.store,
            state=self._host.agent_state,
            snapshot=opened.public.id,
            data_key=None if opened.data_key is None else opened.data_key.hex(),
            trusted=tuple(one.hex() for one in opened.trusted),
            xml=plan.xml if opened.public.contents is Contents.MEMORY else None,
            images=plan.images,
            replace=self._request.fork is None,
            links_down=self._request.fork is not None and not self._request.link_up,
            paused=self._request.paused,
        )
        meant = {
            "snapshot": order.snapshot,
            "store": order.store.name,
            "url": order.store.url,
            "state": order.state,
            "images": plan.images,
        }
        await desk.intend(Step.RESTORE, meant)
        stop = self._caller.stop
        told = await session.carried_out(
            self._host, order.as_json(), self._emit, stop, _Answers(self, plan.uuid, ends)
        )
        return Restored(
            snapshot=order.snapshot,
            guest=plan.guest,
            host=self._host.name,
            disks=Seconds(told["disks"]),
            memory=Seconds(told["memory"]),
            took=Seconds(told["took"]),
            images=plan.images,
            warnings=warnings,
            job=self._recorder.id,
        )

    async def make_way(self, uuid_: str) -> None:
        """End the guest that is there: its images are about to be replaced."""
        self._desk.check()
        await guests.end(self._hypervisor, uuid_)

    def _emit(self, event: Event) -> None:
        self._recorder.take(event)
        self._caller.emit(event)


class _Answers:
    """What the agent may ask for."""

    def __init__(self, work: _Restoring, uuid_: str, ends: bool) -> None:
        self._work, self._uuid, self._ends = work, uuid_, ends

    async def __call__(self, asked: str, _: Mapping[str, Any]) -> dict[str, Any]:
        if asked != "make way":
            return {"refused": "that is not what was ordered"}
        try:
            if self._ends:
                await self._work.make_way(self._uuid)
        except VmckptError as exc:
            return {"refused": str(exc)}
        return {"answer": True}
