"""Begin a protection: check both hosts, create a standby, and start the agents.

The agents continue by themselves; the controller returns once the standby is ready.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from vmckpt.agent import client as agent_client
from vmckpt.errors import BadInput, Cancelled, VmckptError
from vmckpt.hypervisor import domains
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.journal.cancel_requests import cancellable_job
from vmckpt.journal.recorder import JournalStepLog, recorded
from vmckpt.journal.records import NewOperation
from vmckpt.lease.terms import LeaseTerms
from vmckpt.model.events import Caller
from vmckpt.model.finding import Severity
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.protection import agent_client as protection_agent_client
from vmckpt.protection import gather, preflight
from vmckpt.protection.agent_status import ProtectionStatus
from vmckpt.protection.request import Judge, Protected, ProtectRequest, Setting
from vmckpt.protection.resync import Earlier
from vmckpt.protection.steps import READY, Step
from vmckpt.replication.backup import standby_xml
from vmckpt.replication.session import Disk, Lease, ProtectionOutcome, ProtectionTerms, Session
from vmckpt.units import Bytes, Seconds

_TURN = 0.2
_PATIENCE = 15.0
"""How long a watchdog may take to restart an agent that died, in seconds."""
_MARGIN = 0.2
"""The lease's margin, as a share of its lifetime: the holder stops this much earlier, and other
holders begin this much later."""
# Parts of a lease store's URL that an agent does not need, or whose files are not on its host.
_CONTROLLERS = frozenset({"user", "password", "passfile", "service", "sslpassword"})
_NOTHING = MappingProxyType(dict[str, str]())
Told = Callable[[ProtectionStatus], None]
"""Receives the primary's status while the first copy is made."""


async def protect(
    setting: Setting, request: ProtectRequest, caller: Caller, told: Told
) -> Protected:
    """Protect a guest. Returns once the standby is ready.

    With blockers, or for a dry run, returns only the plan. Setting `caller.stop` cancels and leaves
    the guest as it was. Raises VmckptError, Cancelled.
    """
    async with agent_client.shared_logins(setting.primary, setting.backup):
        return await _protect(setting, request, caller, told)


async def _protect(
    setting: Setting, request: ProtectRequest, caller: Caller, told: Told
) -> Protected:
    began = time.monotonic()
    async with Hypervisor(setting.primary) as hypervisor:
        guest = await domains.find_guest(hypervisor, request.guest)
    if guest is None or not guest.state.is_active:
        raise BadInput(f"{request.guest} is not running on {setting.primary.name}")
    looked = await protection_agent_client.order(
        setting.primary, guest.uuid, "look", finder=request.finder or ""
    )
    taking = await gather.taking(setting, request, guest, looked)
    saw = await gather.seen(setting, request, guest, looked, taking)
    overlays = gather.overlays(guest, looked, taking.images, setting.backup.name)
    found = [*taking.findings, *overlays, *preflight.check_protection(saw)]
    found = sorted(found, key=lambda one: one.severity is not Severity.BLOCKER)
    plan = Protected(
        guest=guest.name, primary=setting.primary.name, backup=setting.backup.name, session="",
        job=None, automatic=request.automatic, findings=tuple(found), took=Seconds(0.0),
        status=None, rooms=saw.rooms,
        expected_pause=preflight.expected_pause(saw.epoch_cost, Bytes(sum(saw.memory))),
    )  # fmt: skip
    if request.dry_run or any(one.severity is Severity.BLOCKER for one in found):
        return plan
    new = NewOperation(
        kind="protect", guest=guest.name, guest_uuid=guest.uuid, source=setting.primary.name,
        target=setting.backup.name,
        detail={
            "automatic": request.automatic, "judge": _judge(setting, request),
            "terms": request.terms.as_json(),
        },
    )  # fmt: skip
    async with (
        recorded(new, guest.uuid, caller.warn) as recorder,
        cancellable_job(recorder, caller) as mine,
    ):
        beginning = Beginning(
            setting, request, guest, looked=looked, taken=taking.images, caller=mine,
            step_log=JournalStepLog(recorder),
        )  # fmt: skip
        status = await beginning.run(told)
        recorder.update(phase=READY)
        recorder.entrust(setting.primary.name)
        took = Seconds(time.monotonic() - began)
        return replace(
            plan, session=beginning.session, job=recorder.id, took=took, status=dict(status.told)
        )


def _judge(setting: Setting, request: ProtectRequest) -> str:
    if not request.automatic:
        return str(Judge.PERSON)
    return str(Judge.WATCH if setting.lease is None else Judge.LEASE)


class Beginning:
    """A protection that is being started, or a migration that is carried out as a protection."""

    def __init__(
        self, setting: Setting, request: ProtectRequest, guest: Guest, *, looked: dict[str, Any],
        caller: Caller, step_log: JournalStepLog, taken: Mapping[str, str] = _NOTHING,
    ) -> None:  # fmt: skip
        """`taken`: existing images on the backup that the standby takes over, by disk name."""
        self._setting, self._request, self._guest = setting, request, guest
        self._looked, self._taken, self._caller = looked, taken, caller
        self._step_log = step_log
        self.session = secrets.token_hex(16)
        shared = self._shared()
        self._disks = [disk for disk in gather.replicated(looked) if disk["name"] not in shared]
        made = request.move.images if request.move is not None else _images(
            self._disks, setting.backup, request, guest.name, self.session
        )  # fmt: skip
        self._images = {**made, **taken}

    async def run(self, told: Told) -> ProtectionStatus:
        """Start the protection. Returns the primary's status once the standby is ready.

        Raises VmckptError after undoing the protection as far as possible.
        """
        await self.intend()
        try:
            await self.start()
            return await self._until_ready(told)
        except BaseException as exc:
            await asyncio.shield(self._undo(exc))
            raise

    async def intend(self) -> None:
        """Record the intent in the journal. Raises JournalError, LeaseLost."""
        setting = self._setting
        meant = {
            "session": self.session, "primary": setting.primary.name,
            "backup": setting.backup.name,
            "lease": setting.lease is not None and self._request.automatic,
            "images": {
                setting.primary.name: {disk["name"]: disk["source"] for disk in self._disks},
                setting.backup.name: self._images,
            },
        }  # fmt: skip
        await self._step_log.intend(Step.PROTECT, meant)

    async def start(self) -> None:
        """Create the standby and start both agents.

        After VmckptError, parts of the protection may be left.
        """
        setting, uuid = self._setting, self._guest.uuid
        if self._request.earlier is not None:
            await self._clear(self._request.earlier)
        ours, theirs = await asyncio.gather(
            protection_agent_client.order(setting.primary, uuid, "identity"),
            protection_agent_client.order(setting.backup, uuid, "identity"),
        )
        lease = await asyncio.to_thread(self._lease)
        backup = self._made("backup", lease, theirs, port=0)
        stood = await protection_agent_client.order(
            setting.backup, uuid, "stand", session=asdict(backup), peer=ours["certificate"],
            xml=standby_xml.with_owners_kept(self._looked["xml"], self._shared()),
        )  # fmt: skip
        primary = self._made("primary", lease, ours, port=int(stood["port"]))
        await protection_agent_client.order(
            setting.primary, uuid, "protect", session=asdict(primary), peer=theirs["certificate"]
        )

    async def _clear(self, earlier: Earlier) -> None:
        """Remove the remains of an earlier protection from the backup. Defines no guest there."""
        await protection_agent_client.order(
            self._setting.backup, self._guest.uuid, "end", owner=earlier.session, define=False,
            state=protection_agent_client.kept_in(self._setting.backup, self._guest.uuid),
        )  # fmt: skip

    def _shared(self) -> dict[str, str]:
        """Return the images that are not copied because both hosts see them, by disk name."""
        move = self._request.move
        if move is None:
            return {}
        written = gather.replicated(self._looked)
        named = {disk["name"]: disk["source"] for disk in written}
        return {name: path for name, path in named.items() if name not in move.images}

    def _lease(self) -> Lease | None:
        if self._setting.lease is None or not self._request.automatic:
            return None  # a lease may stop the guest, which only automatic failover permits
        from vmckpt.lease import client  # noqa: PLC0415 - loading psycopg takes 0.1 s

        url, request = self._setting.lease, self._request
        ttl = request.terms.lease
        terms = LeaseTerms(ttl=ttl, margin=Seconds(ttl * _MARGIN))
        client.prepare(url)
        made = client.issue(url, self._guest.uuid, terms, self.session)
        return Lease(url=_as_user(url, made.user, made.password), ttl=terms.ttl,
                     margin=terms.margin)  # fmt: skip

    def _made(self, role: str, lease: Lease | None, told: dict[str, Any], *, port: int) -> Session:
        setting, looked = self._setting, self._looked
        here, there = setting.primary, setting.backup
        if role == "backup":
            here, there = there, here
        definition, autostart = looked["definition"], looked["autostart"]
        disks, images, shared, move = self._disks, self._images, self._shared(), self._request.move
        if role == "backup" and (definition or move is None):
            definition = standby_xml.clean(definition or looked["xml"], images)
        # Output is not buffered in a migration, since only the last epoch is run on the target.
        cards = () if move is not None and role == "primary" else tuple(looked["cards"])
        return Session(
            role=role, session=self.session, guest=self._guest.uuid, name=self._guest.name,
            host=here.name, peer=there.name, uri=agent_client.LIBVIRT,
            terms=_terms(self._request),
            lease=lease,
            disks=tuple(
                Disk(
                    target=disk["name"], size=int(disk["size"]), format=disk["format"],
                    path=images[disk["name"]] if role == "backup" else disk["source"],
                    taken=role == "backup" and disk["name"] in self._taken,
                )
                for disk in disks
            ),
            address=_address(setting.backup), port=port, owner=tuple(told["owner"]),
            cards=cards, undo=looked["undo"], definition=definition, moves=move is not None,
            state=protection_agent_client.kept_in(here, self._guest.uuid),
            extra={
                "autostart": autostart,
                "shared": [one["source"] for one in looked["disks"]
                           if one["name"] in shared and one["kind"] == "file"],
                "nodes": {disk["name"]: disk["node"] for disk in disks},
                "devices": looked["devices"], "private": looked["private"],
                "finder": looked["epoch_cost"]["finder"],
                "finder_why": looked["epoch_cost"]["why"],
            },
        )  # fmt: skip

    async def _until_ready(self, told: Told) -> ProtectionStatus:
        answers = time.monotonic()
        while True:
            if self._caller.stop.is_set():
                raise Cancelled("stopped: the guest is not protected")
            status = await protection_agent_client.status(self._setting.primary, self._guest.uuid)
            if status.phase == READY:
                return status
            if status.devices_changed:
                raise VmckptError(
                    f"a device of {self._guest.name} was plugged in or unplugged while the standby"
                    " was being set up",
                    hint=f"run vmckpt protect {self._guest.name} --to {self._setting.backup.name}"
                    " again",
                )
            if status.wants_leave:
                raise VmckptError(
                    f"the standby on {self._setting.backup.name} did not become ready:"
                    f" {status.says}"
                )
            answers = time.monotonic() if status.agent else answers
            if status.outcome is not None or time.monotonic() - answers > _PATIENCE:
                why = status.why or status.says or status.error or "no reason reported"
                raise VmckptError(
                    f"the primary's agent on {self._setting.primary.name} has stopped or does not"
                    f" answer: {why}",
                    hint="run vmckpt recover",
                )
            told(status)
            await asyncio.sleep(_TURN)

    async def _undo(self, why: BaseException) -> None:
        """Undo the protection, unless the guest died and its standby is complete.

        Recovery cleans up what cannot be undone now.
        """
        if await self._is_all_there_is():
            self._caller.warn(
                f"{self._guest.name} died on {self._setting.primary.name}, but its standby is"
                f" complete: run it with vmckpt failover {self._guest.name}"
            )
            if isinstance(why, VmckptError):
                why.undone = False
            return
        gone = ended = True
        for host in (self._setting.backup, self._setting.primary):
            try:
                if not gone and _judge(self._setting, self._request) == Judge.WATCH:
                    # `vmckpt run` must not start the standby that is left.
                    await self._step_log.intend(
                        Step.ALONE, {"why": "starting the protection was abandoned"}
                    )
                await protection_agent_client.order(
                    host, self._guest.uuid, "end", standby_gone=gone, owner=self.session
                )
            except VmckptError as exc:
                self._caller.warn(f"{host.name}: could not undo the protection: {exc}")
                gone, ended = False, host is not self._setting.primary
                if isinstance(why, VmckptError):
                    why.undone = False
        # A primary that may still be running keeps its lease until recovery finds it stopped.
        if ended and self._setting.lease is not None and self._request.automatic:
            from vmckpt.lease import client  # noqa: PLC0415 - loading psycopg takes 0.1 s

            try:
                await asyncio.to_thread(
                    client.revoke, self._setting.lease, self._guest.uuid, force=True,
                    session=self.session,
                )  # fmt: skip
            except VmckptError as exc:
                self._caller.warn(f"could not revoke the lease: {exc}")

    async def _is_all_there_is(self) -> bool:
        """Return whether the guest died and its standby covers all output that was released."""
        if self._request.move is not None:
            return False
        ours, theirs = await asyncio.gather(
            protection_agent_client.status(self._setting.primary, self._guest.uuid),
            protection_agent_client.status(self._setting.backup, self._guest.uuid),
        )
        return outlived(ours, theirs)


def outlived(ours: ProtectionStatus, theirs: ProtectionStatus) -> bool:
    """Return whether the guest died and its standby covers all released output. Pure."""
    died = ours.outcome == ProtectionOutcome.DIED and ours.runs is False
    return died and not ours.alone and bool(theirs.ready)


def _terms(request: ProtectRequest) -> ProtectionTerms:
    terms = request.terms
    return ProtectionTerms(
        interval=terms.interval, automatic=request.automatic, slowdown=terms.slowdown,
        max_pause=terms.max_pause, hold=terms.hold,
        bandwidth=None if request.move is None else request.move.bandwidth,
    )  # fmt: skip


def _as_user(url: str, user: str, password: str) -> str:
    """Return the URL of the same database for another user."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    # The controller's credentials are not passed to the agents.
    query = urlencode([one for one in parse_qsl(parts.query) if one[0] not in _CONTROLLERS])
    login = f"{quote(user)}:{quote(password)}@{place}"
    return urlunsplit(parts._replace(netloc=login, query=query))


def _address(host: Host) -> str:
    """Return the address at which other hosts reach this host. Raises BadInput if unknown."""
    if (address := host.address_for_peers) is not None:
        return address
    raise BadInput(
        f"{host.name}: no address that the other host can reach",
        host=host.name,
        hint="add migration_address: to the inventory",
    )


def _images(
    disks: Sequence[dict[str, Any]], host: Host, request: ProtectRequest, guest: str, session: str
) -> dict[str, str]:
    """Return a unique path for each of the standby's images, by disk name. `host`: the backup."""
    found = {}
    for disk in disks:
        folder = gather.image_folder(disk, host, request)
        found[disk["name"]] = f"{folder}/{guest}-{disk['name']}-{session[:8]}.{disk['format']}"
    return found
