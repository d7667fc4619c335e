"""Restore a snapshot: the controller's part. An agent on the chosen host does the work.

Guests of a group wait for each other.
"""

import asyncio
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from vmckpt.agent import client
from vmckpt.agent.orders import RestoreOrder
from vmckpt.agent.protocol import error_as_json
from vmckpt.agent.results import RestoreResult
from vmckpt.capture import firmware
from vmckpt.errors import (
    BadInput,
    GuestLocked,
    HypervisorError,
    RemoteError,
    TimedOut,
    VmckptError,
)
from vmckpt.hypervisor import domains, hardware, lifecycle
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.guest_agent import CHANNEL
from vmckpt.journal.cancel_requests import cancellable_job
from vmckpt.journal.recorder import JournalStepLog, Recorder, recorded
from vmckpt.journal.records import NewOperation
from vmckpt.model.disk import StorePlace
from vmckpt.model.events import Caller, Event
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.snapshot.request import Restored, RestoreRequest, Step
from vmckpt.snapshot.restore import domain_xml, exclusivity, hook, preflight
from vmckpt.store.format.metadata import Contents, Public
from vmckpt.store.format.private_part import Private


class Gate:
    """A barrier that the members of a group pass several times, each time together.

    Unlike with asyncio.Barrier, a later failure is not reported to members that have passed.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._here = 0
        self._failed = False
        self._opens: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def all_here(self, meanwhile: str) -> None:
        """Wait for the other members.

        If the group fails, raises TimedOut with the message `meanwhile`, which describes the state
        of the waiting member.
        """
        if self._failed:
            raise TimedOut(meanwhile)
        opens = self._opens
        self._here += 1
        if self._here == self._size:
            self._here = 0
            self._opens = asyncio.get_running_loop().create_future()
            opens.set_result(True)
        if not await asyncio.shield(opens):
            raise TimedOut(meanwhile)

    def fail(self) -> None:
        """Make all waits fail, now and later."""
        self._failed = True
        if not self._opens.done():
            self._opens.set_result(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A snapshot whose manifest was read and opened."""

    store: StorePlace
    public: Public
    private: Private
    data_key: bytes | None
    trusted: frozenset[bytes]
    others: tuple[StorePlace, ...] = ()
    """Other stores, for chunks that `store` has lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The guest to be restored, and the paths of its images."""

    guest: str
    uuid: str
    xml: str
    images: dict[str, str]
    warnings: tuple[str, ...] = ()


async def restore(
    host: Host, opened: Opened, request: RestoreRequest, caller: Caller,
    *, hosts: Mapping[str, Host], gate: Gate | None = None,
) -> Restored:  # fmt: skip
    """Restore a snapshot on a host.

    The original guest is restored only if it is not running on another of `hosts` and no other
    guest on them uses its images; for a fork, the hosts are not queried. With a gate, the guest
    waits for the other guests of its group before it is stopped, before it is restored, and before
    it runs.

    Setting `caller.stop` before the guest is started cancels the restore and raises Cancelled.
    Raises VmckptError. After an error, nothing of the restore is left, but a guest that was stopped
    for the restore stays off; the error reports this.
    """
    plan = planned(opened, request)
    async with client.shared_logins(host), Hypervisor(host) as hypervisor:
        warnings = (
            *plan.warnings,
            *await preflight.checked(hypervisor, opened.public, opened.private),
        )
        if not request.trust_definition:
            await preflight.bounded(
                hypervisor, opened.public, opened.private,
                xml=plan.xml, images=plan.images, folder=request.folder,
            )  # fmt: skip
        new = _operation(host, opened, plan)
        async with (
            recorded(new, plan.uuid, caller.warn) as recorder,
            cancellable_job(recorder, caller) as mine,
        ):
            work = _Restoring(hypervisor, opened, request, mine, recorder, gate=gate)
            users = await work.alone(plan, hosts)
            bases, used = await work.base_images(plan, hosts, users)
            await _in_the_way(hypervisor, plan, request)
            known = await domains.inspect_guest(hypervisor, plan.uuid)
            restored = await work.run(plan, warnings, hosts, used, bases)
            # A transient guest, which ran without a stored definition, stays transient.
            if not (known and known.active and known.stored is None):
                said = await _define(hypervisor, work.defined(plan, restored))
                restored = replace(restored, warnings=(*restored.warnings, *said))
            await work.all_here(f"is restored on {host.name} and paused", plan)
            if work.stands and (told := await work.let_go(plan)):
                restored = replace(restored, warnings=(*restored.warnings, told))
            # A lazy restore stays open for recovery: the guest is running, but its disks are still
            # being restored.
            if restored.whole:
                recorder.finish(Outcome.COMPLETED, restored.as_json())
            return restored


async def rehearse(host: Host, opened: Opened, request: RestoreRequest) -> tuple[str, ...]:
    """Check, as far as possible without changes, that a restore would succeed. Returns warnings.

    Raises BadInput if the restore cannot be planned, or with all reasons why the host cannot run
    the guest; HypervisorError.
    """
    planned(opened, request)
    async with Hypervisor(host) as hypervisor:
        return await preflight.checked(hypervisor, opened.public, opened.private)


def planned(opened: Opened, request: RestoreRequest, *, overlays: bool = False) -> _Plan:
    """Return the definition and images of the restored guest. Raises BadInput.

    `overlays`: the disks become qcow2 overlays, whatever their format is in the snapshot.
    """
    facts, public = opened.private.facts, opened.public
    memory = public.contents is Contents.MEMORY
    try:
        images = {
            one.target: _image(facts.domain_xml, one.target, request, overlays=overlays)
            for one in facts.disks
        }
        if request.fork is None:
            xml = domain_xml.xml_for_replace(facts.domain_xml, images)
            images |= firmware.places(opened.private.files, xml, public.guest_uuid)
            beside = domain_xml.beside(xml, {one.target for one in facts.disks})
            return _Plan(
                guest=public.guest, uuid=public.guest_uuid, xml=xml, images=images,
                warnings=tuple(f"{one} is not in the snapshot and is unchanged" for one in beside),
            )  # fmt: skip
        if memory:
            _require_own_macs(facts.domain_xml, request)
        macs = [_new_mac() for _ in range(domain_xml.cards(facts.domain_xml))]
        own = str(uuid.uuid4())
        xml = domain_xml.xml_for_fork(
            facts.domain_xml, images, name=request.fork, uuid=own, macs=macs,
            link_up=links_up_at_once(request, public),
        )  # fmt: skip
        xml = firmware.own_nvram(xml, request.fork)
        xml, said = domain_xml.unshared(xml, {one.target for one in facts.disks}, memory=memory)
        images |= firmware.places(opened.private.files, xml, own)
    except ValueError as exc:
        raise BadInput(f"snapshot {public.id}: invalid guest definition: {exc}") from exc
    return _Plan(guest=request.fork, uuid=own, xml=xml, images=images, warnings=said)


def links_up_at_once(request: RestoreRequest, public: Public) -> bool:
    """Return whether a fork starts with its links up.

    A fork with memory first needs MAC addresses of its own.
    """
    memory = public.contents is Contents.MEMORY
    return request.link_up and request.on_restore is None and not memory


def _require_own_macs(xml: str, request: RestoreRequest) -> None:
    """Check that a fork with memory can get its own MACs before its links come up.

    Raises BadInput.
    """
    if not request.link_up or not domain_xml.cards(xml):
        return
    if request.paused:
        why = "a paused fork has the MAC addresses of its original"
    elif CHANNEL not in xml:
        why = "the snapshot's memory contains the original's MAC addresses, and the guest has no"
        why += " guest agent that could change them"
    else:
        return
    raise BadInput(
        f"--link is refused: {why}",
        hint=f"omit --link; to connect {request.fork} later, restart it with its own MAC addresses"
        f" (virsh destroy {request.fork}; virsh start {request.fork}), and run virsh domif-setlink"
        f" {request.fork} MAC up",
    )


def _image(xml: str, target: str, request: RestoreRequest, *, overlays: bool) -> str:
    """Return the path for a disk's image: its original path, or a path with the fork's name."""
    path = PurePosixPath(domain_xml.image_of(xml, target))
    if request.fork is None:
        return str(path)
    folder = PurePosixPath(request.folder) if request.folder else path.parent
    suffix = ".qcow2" if overlays else path.suffix
    return str(folder / f"{request.fork}-{target}{suffix}")


def _new_mac() -> str:
    """Return a random MAC address with QEMU's prefix."""
    return "52:54:00:" + ":".join(f"{byte:02x}" for byte in secrets.token_bytes(3))


async def _in_the_way(hypervisor: Hypervisor, plan: _Plan, request: RestoreRequest) -> bool:
    """Return whether a running guest must be stopped first.

    Raises GuestLocked if it may not be stopped, and BadInput if the name is taken or saved memory
    prevents the restore.
    """
    guest = await domains.find_guest(hypervisor, plan.uuid)
    if request.fork is not None:
        if await domains.find_guest(hypervisor, plan.guest) is not None:
            raise BadInput(
                f"{hypervisor.host.name} already has a guest {plan.guest}",
                hint="choose another name with --as",
            )
        return False
    if guest is not None and guest.name != plan.guest:
        raise BadInput(
            f"the guest is named {plan.guest} in the snapshot and {guest.name} on"
            f" {hypervisor.host.name}; libvirt allows one name per UUID",
            hint=f"run virsh domrename {guest.name} {plan.guest}, or use --as to make a fork",
        )
    if guest is None or not guest.state.is_active:
        if guest is not None and await lifecycle.is_saved(hypervisor, plan.uuid):
            raise BadInput(
                f"{plan.guest} has saved memory on {hypervisor.host.name} that does not match the"
                " disks in the snapshot; its next start would combine both",
                hint=f"to discard the saved memory, run virsh managedsave-remove {plan.guest}",
            )
        return False
    if not request.end_running:
        raise GuestLocked(
            f"{guest.name} is {guest.state.in_words} on {hypervisor.host.name}; nothing was"
            " changed",
            hint="shut the guest down, or use --replace to stop it before the restore",
        )
    return True


async def _define(hypervisor: Hypervisor, plan: _Plan) -> tuple[str, ...]:
    """Replace the guest's stored definition if it does not match the restored guest.

    Returns warnings.
    """
    host = hypervisor.host.name
    changed: list[str] = []

    def decide(found: str | None) -> str | None:
        wanted = domain_xml.wanted(found, plan.xml)
        if found is not None and wanted is not None:
            changed.extend(hardware.differs(found, plan.xml))
        return wanted

    try:
        await domains.put_right(hypervisor, plan.uuid, decide)
    except (HypervisorError, ValueError) as exc:
        return (
            f"{plan.guest} was restored, but its definition on {host} could not be stored: {exc}",
        )
    if changed:
        parts = ", ".join(changed)
        return (f"the stored definition on {host} differed ({parts}) and was replaced",)
    return ()


def _operation(host: Host, opened: Opened, plan: _Plan) -> NewOperation:
    return NewOperation(
        kind="restore",
        guest=plan.guest,
        guest_uuid=plan.uuid,
        source=host.name,
        detail={"store": opened.store.name, "snapshot": opened.public.id},
    )


class _Restoring:
    """A restore that is in progress."""

    def __init__(
        self, hypervisor: Hypervisor, opened: Opened, request: RestoreRequest, caller: Caller,
        recorder: Recorder, *, gate: Gate | None = None,
    ) -> None:  # fmt: skip
        self._hypervisor, self._opened, self._request = hypervisor, opened, request
        self._gate = gate
        self._host = hypervisor.host
        self._caller, self._recorder = caller, recorder
        self._step_log = JournalStepLog(recorder)
        self.stands = gate is not None and not request.paused
        """Whether the guest is restored paused, and resumed once its whole group is restored."""
        self._hook: int | None = None
        self._ended = False

    async def alone(self, plan: _Plan, hosts: Mapping[str, Host]) -> dict[str, tuple[str, str]]:
        """Check that no other host runs the guest and no other guest uses its images.

        Returns the owners and formats of the images of other guests, by path; empty for a fork.
        Raises GuestLocked, HostUnreachable.
        """
        if self._request.fork is not None:
            return {}
        heard = await exclusivity.query_hosts(hosts.values(), plan.uuid)
        exclusivity.require_exclusive(heard, self._host.name, plan.guest, plan.images.values())
        return exclusivity.image_users(heard)

    async def base_images(
        self, plan: _Plan, hosts: Mapping[str, Host], users: Mapping[str, tuple[str, str]]
    ) -> tuple[dict[str, tuple[str, str, str]], Mapping[str, tuple[str, str]]]:
        """Return the base images of the disks, as in preflight.usable_bases, and the users of
        images, which include those of the original if the guest is a fork.

        Raises HypervisorError.
        """
        opened, silent = self._opened, None
        if self._request.fork is not None and domain_xml.bases(opened.private.facts.domain_xml):
            known = {self._host.name: self._host, **hosts}
            heard = await exclusivity.query_hosts(known.values(), plan.uuid)
            users = exclusivity.image_users(heard)
            silent = next((one.host for one in heard if one.error is not None), None)
        found = await preflight.usable_bases(
            self._hypervisor, opened.public, opened.private, self._request, silent
        )
        return found, users

    async def run(
        self, plan: _Plan, warnings: tuple[str, ...], hosts: Mapping[str, Host],
        users: Mapping[str, tuple[str, str]], bases: Mapping[str, tuple[str, str, str]],
    ) -> Restored:  # fmt: skip
        """Send the restore order to the agent, and wait for its result. Raises VmckptError."""
        opened, step_log = self._opened, self._step_log
        order = RestoreOrder(
            guest=plan.uuid,
            uri=client.LIBVIRT,
            host=self._host.name,
            store=opened.store,
            state=self._host.agent_state,
            snapshot=opened.public.id,
            data_key=None if opened.data_key is None else opened.data_key.hex(),
            trusted=tuple(one.hex() for one in opened.trusted),
            xml=plan.xml if opened.public.contents is Contents.MEMORY else None,
            images=plan.images,
            replace=self._request.fork is None and self._request.end_running,
            links_down=self._request.fork is not None
            and not links_up_at_once(self._request, opened.public),
            paused=self._request.paused or self.stands,
            others=opened.others,
            follows=self._request.fork is None,
            users=users,
            bases=bases,
        )
        meant: dict[str, Any] = {
            "snapshot": order.snapshot,
            "store": order.store.name,
            "url": order.store.url,
            "id": order.store.id,
            "state": order.state,
            "images": plan.images,
            "memory": order.xml is not None,
        }
        if self._request.lazy:
            meant["lazy"] = True
        if self.stands:
            meant["stands"] = True
        if self._request.on_restore is not None:
            meant["on_restore"] = self._request.on_restore
        await step_log.intend(Step.RESTORE, meant)
        stop = self._caller.stop
        ordered = order.as_json() | ({"do": "restore-lazy"} if self._request.lazy else {})
        try:
            told = await client.run_order(
                self._host, ordered, self._emit, stop, _Answers(self, plan, hosts)
            )
        except VmckptError as exc:
            if self._ended and exc.undone and not isinstance(exc, RemoteError):
                exc.message += (
                    f"; {plan.guest} was stopped for the restore and is off; its disks are"
                    " unchanged"
                )
                exc.hint = f"start it with virsh start {plan.guest} on {self._host.name}"
            raise
        await self.follow(plan)
        with client.sensible(self._host):
            done = RestoreResult.parse(told)
        return Restored(
            snapshot=order.snapshot, guest=plan.guest, host=self._host.name, disks=done.disks,
            memory=done.memory, took=done.took, images=plan.images,
            warnings=(*warnings, *done.warnings), job=self._recorder.id, hook=self._hook,
            whole=done.whole, runs=order.xml is not None, links_down=done.links_down,
            bases=done.bases, clock_not_set=done.clock_not_set,
        )  # fmt: skip

    def defined(self, plan: _Plan, restored: Restored) -> _Plan:
        """Return the plan with the definition to store: a fork's links are as they are now."""
        up = self._request.link_up and not self._hook and not restored.links_down
        if self._request.fork is None or not up or not restored.runs:
            return plan
        return replace(plan, xml=domain_xml.with_links_up(plan.xml))

    async def follow(self, plan: _Plan) -> bool:
        """Run the hook, if any, unless it was already run. Returns whether links may be up."""
        command = self._request.on_restore
        if command is not None and self._hook is None:
            await self._step_log.intend(Step.HOOK, {"on_restore": command})
            opened = self._opened
            told = hook.hook_env(
                opened.public, opened.store.name,
                guest=plan.guest, uuid=plan.uuid, host=self._host.name,
            )  # fmt: skip
            self._hook = await hook.run_hook(command, told, self._caller.stop)
        return self._request.link_up and not self._hook

    async def make_way(
        self, plan: _Plan, hosts: Mapping[str, Host], about: Mapping[str, Any]
    ) -> None:  # fmt: skip
        """Stop the existing guest, because its images are replaced next.

        Writing the new images may have taken an hour, so all hosts are queried again. `about`: the
        marks of the new images ("made") and the paths that have no image yet ("empty"), which are
        recorded. Raises VmckptError.
        """
        await self.alone(plan, hosts)
        ends = await _in_the_way(self._hypervisor, plan, self._request)
        await self.all_here("is unchanged", plan)
        await self._step_log.intend(
            Step.MAKE_WAY, {"made": dict(about["made"]), "empty": list(about["empty"])}
        )
        self._step_log.check()
        if ends:
            await domains.end(self._hypervisor, plan.uuid)
            self._ended = True
        await self.all_here("is not restored", plan)

    async def all_here(self, meanwhile: str, plan: _Plan) -> None:
        """Wait for the other guests if this is a group restore.

        Raises TimedOut if the group fails; its message ends with `meanwhile`, the guest's state.
        """
        if self._gate is not None:
            await self._gate.all_here(f"{plan.guest} {meanwhile}")

    async def let_go(self, plan: _Plan) -> str | None:
        """Resume the guest after its whole group was restored. Returns a warning if that fails.

        Raises LeaseLost.
        """
        try:
            self._step_log.check()
            await domains.resume(self._hypervisor, plan.uuid)
        except HypervisorError as exc:
            return (
                f"{plan.guest} was restored but may still be paused: {exc}; run virsh resume"
                f" {plan.guest}"
            )
        return None

    def _emit(self, event: Event) -> None:
        self._recorder.take(event)
        self._caller.emit(event)


class _Answers:
    """Answers the agent's questions during a restore."""

    def __init__(self, work: _Restoring, plan: _Plan, hosts: Mapping[str, Host]) -> None:
        self._work, self._plan, self._hosts = work, plan, hosts

    async def __call__(self, asked: str, about: Mapping[str, Any]) -> dict[str, Any]:
        try:
            if asked == "ready":
                await self._work.all_here("is unchanged", self._plan)
                return {"answer": True}
            if asked == "started":
                return {"answer": {"links_up": await self._work.follow(self._plan)}}
            if asked != "make way":
                return {"refused": f"the agent sent a request that no restore needs: {asked[:40]}"}
            await self._work.make_way(self._plan, self._hosts, about)
        except VmckptError as exc:
            return {"refused": str(exc), "error": error_as_json(exc)}
        return {"answer": True}
