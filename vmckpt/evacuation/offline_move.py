"""Guests that are off: their definitions move, and the disks that the new host does not see.

Nobody tries there before the guest is started, perhaps months later: so every file that it writes
to must be seen to be the same on both hosts, or is copied.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, replace

from vmckpt.errors import HypervisorError, JournalError, LeaseLost, RemoteError, VmckptError
from vmckpt.evacuation.plan.inventory import Known, TravelMethod, all_files
from vmckpt.evacuation.plan.plan import Checked
from vmckpt.hypervisor import domains, lifecycle, storage
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.journal import jobs
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import StepState, StoredStep
from vmckpt.migration.cancellable import cancellable
from vmckpt.migration.forecast.forecast import Range
from vmckpt.migration.forecast.measure import Links
from vmckpt.migration.plan import preflight, storage_cleanup, storage_copy
from vmckpt.migration.plan.host_facts import Remotes
from vmckpt.model.disk import NVRAM, CopyPlan, Drive, Made
from vmckpt.model.events import Estimate, Sampled
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.host import Host
from vmckpt.model.migration import JobPhase, JobSample
from vmckpt.policy.model import CopyKind
from vmckpt.remote import image_copy, images, probe
from vmckpt.units import Bytes, BytesPerSecond, Seconds

IMAGES = "images"
"""The step of images that are made on another host; open: they may have to go again."""
_NOTHING = CopyPlan()
_SLOWER, _SETUP = 1.5, Seconds(5.0)
"""A copy may have that much less of a link than was seen, and images and logins take their time: 40
and 100 MiB over 50 Mbit/s took 2.6 and 3.8 s more than the link in a lab without a free core."""
Tell = Callable[[Sampled], None]
Logins = Callable[[str, str], AbstractAsyncContextManager[Remotes | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Both hosts of such a move; `remotes`: None if one takes no logins."""

    source: Host
    target: Host
    remotes: Remotes | None


async def check_move(known: Known, ends: Ends, links: Links) -> Checked:
    """What speaks against a move, what would travel, and how long that takes."""
    try:
        found = await plan_copies(known, ends)
    except VmckptError as exc:
        found = CopyPlan(findings=(_unseen(ends.target.name, exc.message, exc.hint),))
    if found.copies and not preflight.blockers(found.findings):
        link, _ = await links.between(ends.source, ends.target, ends.remotes)
        return _forecast(known, found, None if link is None else link.rate)
    return _checked(known, found)


def _forecast(known: Known, found: CopyPlan, link: BytesPerSecond | None) -> Checked:
    """With what it takes if the link carries what it was seen to, and if it carries less."""
    made = replace(_checked(known, found), sent=Range(found.travels, found.travels))
    if link is None:
        return made
    rate = min(link, known.policy.limits.bandwidth or link)
    slow = BytesPerSecond(max(1, round(rate / _SLOWER)))
    return replace(
        made, link=link, bandwidth=Range(slow, rate),
        total=Range(found.travels / rate, _SETUP + found.travels / slow),
    )  # fmt: skip


def _checked(known: Known, found: CopyPlan) -> Checked:
    return Checked(
        policy=known.policy.name, mode=str(TravelMethod.OFFLINE),
        blockers=preflight.blockers(found.findings),
        warnings=tuple(one for one in found.findings if one.severity is Severity.WARNING),
        rooms=found.rooms,
    )  # fmt: skip


async def plan_copies(known: Known, ends: Ends) -> CopyPlan:
    """What is copied, by the guest's policy. Raises HypervisorError, RemoteError, BadInput."""
    overrides, guest = known.policy.storage, known.guest
    if overrides.copy is CopyKind.SHARED:
        return _NOTHING
    if ends.remotes is None:
        why = f"disks are copied only between hosts with ssh logins; {ends.source.name} or"
        hint = "add ssh: {address: ...} for both to the inventory, or share its disks"
        return CopyPlan(findings=(_unseen(ends.target.name, f"{why} it has none", hint),))
    async with Hypervisor(ends.source) as here, Hypervisor(ends.target) as there:
        drives = await storage.drives(here, guest.uuid)
        wish = await storage_copy.wish_of(overrides, there)
    files = set(all_files(guest))
    if guest.nvram is not None:
        place = (await images.places(ends.remotes[0], [guest.nvram]))[guest.nvram]
        if place.exists or not place.writable:  # or in a folder where we may not see it
            drives = (*drives, _nvram(guest.nvram))
        else:
            files.discard(guest.nvram)  # libvirt makes it when the guest starts for the first time
    same = await probe.same_files(*ends.remotes, sorted(files))
    found = await storage_copy.plan_copies(*ends.remotes, drives, same, wish)
    # Also what lies below a disk that both see.
    unseen = [one for one in sorted(files) if not same.get(one) and one not in found.left_behind]
    if not unseen or preflight.blockers(found.findings):
        return found
    why = f"{unseen[0]} is not copied, and was not seen to be the same there"
    return replace(found, findings=(*found.findings, _unseen(ends.target.name, why, None)))


def _nvram(path: str) -> Drive:
    return Drive(
        name=NVRAM, kind="file", device=NVRAM, path=path, format="raw", read_only=False,
        encrypted=False,
    )  # fmt: skip


def _unseen(where: str, text: str, hint: str | None) -> Finding:
    return Finding(
        code="disks-not-seen", severity=Severity.BLOCKER, where=where, text=text,
        hint=hint or "share its disks between the hosts",
    )  # fmt: skip


async def move(
    known: Known, ends: Ends, recorder: Recorder, stop: asyncio.Event, tell: Tell
) -> tuple[str, ...]:
    """Move a guest that is off; troubles that keep nobody from starting it there.

    Raises HypervisorError, RemoteError and Cancelled: it is where it was, and nothing of it on the
    target; OutcomeUnknown: both must be looked at. JournalError, LeaseLost.
    """
    found = await plan_copies(known, ends)
    if against := preflight.blockers(found.findings):
        raise HypervisorError(against[0].text, host=against[0].where, hint=against[0].hint)
    async with Hypervisor(ends.source) as here:
        if ends.remotes is None or not found.copies:
            await lifecycle.move_offline(here, known.guest.uuid, ends.target.uri_for_peers)
            return ()
        return await _Copy(known, ends.target, ends.remotes, recorder, found).move(here, stop, tell)


class _Copy:
    """Images that go with one guest."""

    def __init__(
        self, known: Known, target: Host, remotes: Remotes, recorder: Recorder, plan: CopyPlan
    ) -> None:
        self._known, self._target, self._plan = known, target, plan
        self._here, self._there = remotes
        self._recorder = recorder
        self._made = Made(host=target.name, suffix=storage_copy.new_suffix())
        # What an interrupted beginning may have made goes by its temporary name.
        self._made.marks.update(dict.fromkeys((one.path for one in plan.copies), ""))
        self._step, self._ordered = 0, False

    async def move(self, here: Hypervisor, stop: asyncio.Event, tell: Tell) -> tuple[str, ...]:
        paths, uuid = self._plan.left_behind, self._known.guest.uuid
        before = await images.stamps(self._here, paths)
        old = await storage_cleanup.marks((self._here, self._there), self._plan, runs=False)
        await self._intend()
        try:
            await cancellable(self._fill(tell), stop)
            await images.publish(self._there, self._made)
            self._recorder.check()
            if await images.stamps(self._here, paths) != before:
                raise HypervisorError(
                    "its disks were written to while they were copied", host=here.host.name
                )
            _, stored = await storage.definitions_with_images_at(here, uuid, self._plan.placed)
            here.check_lease = self._recorder.check
            self._ordered = True
            await lifecycle.move_offline(here, uuid, self._target.uri_for_peers, stored)
        except LeaseLost:
            raise
        except BaseException:
            # Whatever libvirt said to the order: the images go when both hosts were looked at.
            if not self._ordered:
                await asyncio.shield(self._undo())
            raise
        both, check = (self._here, self._there), self._recorder.check
        old = await self._unwritten(old, before)
        tidied = await storage_cleanup.finish(self._plan, old, here, both, check)
        result = {"marks": dict(self._made.marks), "removed": list(tidied.removed)}
        troubles = (*tidied.troubles, *tidied.stays)
        try:
            await asyncio.to_thread(self._recorder.conclude, self._step, StepState.DONE, result)
        except JournalError as exc:  # it has arrived all the same
            return (*troubles, exc.message)
        return troubles

    async def _unwritten(self, old: dict[str, str], before: str) -> dict[str, str]:
        """Nobody but QEMU's lock keeps others from writing to the images until libvirt is done."""
        with suppress(RemoteError):
            if await images.stamps(self._here, self._plan.left_behind) == before:
                return old
        return dict.fromkeys(old, f"{images.UNFIT}it may have been written to since it was copied")

    async def _intend(self) -> None:
        known, made = self._known, self._made
        meant = {
            "guest": known.guest.name, "uuid": known.guest.uuid, "from": known.host,
            "host": made.host, "suffix": made.suffix,
            "paths": [one.path for one in self._plan.copies],
            **storage_cleanup.meant(self._plan),
        }  # fmt: skip
        self._step = await asyncio.to_thread(self._recorder.intend, IMAGES, meant)

    async def _fill(self, tell: Tell) -> None:
        """All content is there before an image gets its path."""
        made = await storage_copy.prepare(self._there, self._plan, self._made.suffix)
        self._made.marks.update(made.marks)
        marks = {"marks": dict(made.marks)}
        await asyncio.to_thread(self._recorder.conclude, self._step, StepState.INTENDED, marks)
        to = self._target.address_for_peers
        assert to is not None  # there are logins
        loop, copied = asyncio.get_running_loop(), 0
        began = Seconds(loop.time())
        for one in self._plan.copies:
            there = copied

            def heard(part: float, size: int = one.allocated, there: int = there) -> None:
                done = Bytes(round(there + part * size))
                tell(progress(done, self._plan.travels, began, Seconds(loop.time())))

            content = image_copy.Content(
                path=one.source, format=one.format, size=one.size, to=made.temporary(one.path),
                address=to, limit=self._known.policy.limits.bandwidth,
            )  # fmt: skip
            await image_copy.copy(self._here.host, self._target, content, heard)
            await images.keep(self._there, content.to, one.format)
            copied += one.allocated

    async def _undo(self) -> None:
        """What cannot be removed now stays written down; see `undo_left`."""
        with suppress(VmckptError):
            if not await storage_copy.remove(self._there, self._made):
                await asyncio.to_thread(self._recorder.conclude, self._step, StepState.UNDONE)


def progress(done: Bytes, total: Bytes, began: Seconds, now: Seconds) -> Sampled:
    """How far a copy is, as the samples of a migration tell it. Pure."""
    took, rest = now - began, Bytes(max(0, total - done))
    rate = BytesPerSecond(round(done / took) if took > 0 else 0)
    left = Seconds(rest / rate) if rate else None
    return Sampled(
        sample=JobSample(
            at=now, phase=JobPhase.SETUP, iteration=0, remaining=rest, total=total,
            transferred=done, bandwidth=rate, dirty_rate=None, expected_downtime=None, throttle=0,
        ),
        estimate=Estimate(low=left, high=left, converging=None),
        done=done / total if total else 1.0,
    )  # fmt: skip


def left_by(job: str) -> Sequence[StoredStep]:
    """Images of moves that have ended, and of a controller that died. Raises JournalError."""
    with jobs.open_journal() as journal:
        steps = journal.steps(job)
    return [one for one in steps if one.name == IMAGES and one.state is StepState.INTENDED]


async def undo_left(
    steps: Sequence[StoredStep], host: Callable[[str], Host], logins: Logins, recorder: Recorder
) -> tuple[str, ...]:
    """They stay where the guest has arrived, and go if it is seen where it was: who is on neither
    host may have gone on from there with them. What could not be settled, line by line.

    Raises LeaseLost: they are another controller's now.
    """
    troubles: list[str] = []
    for step in steps:
        source, target = str(step.intent["from"]), str(step.intent["host"])
        try:
            recorder.check()
            async with Hypervisor(host(source)) as here, Hypervisor(host(target)) as there:
                state, left = await _settle(step, here, there, logins)
            troubles += left
            if state is not StepState.INTENDED:
                await asyncio.to_thread(recorder.conclude, step.seq, state)
        except LeaseLost:
            raise
        except VmckptError as exc:
            paths = ", ".join(map(str, step.intent.get("paths", [])))
            troubles.append(f"{target} may have {paths}, made for a move that ended: {exc.message}")
    return tuple(troubles)


async def _settle(
    step: StoredStep, here: Hypervisor, there: Hypervisor, logins: Logins
) -> tuple[StepState, list[str]]:
    """What came of a step, and what is to be told of it. Raises HypervisorError, RemoteError."""
    source, target, uuid = here.host.name, there.host.name, str(step.intent["uuid"])
    before = await domains.presence(here, uuid)
    found = await domains.presence(there, uuid)
    if not found.reachable:
        raise HypervisorError("it does not answer", host=target)
    if found.state is not None:
        async with AsyncExitStack() as stack:
            # What follows an arrival keeps nobody waiting for a host that is gone.
            remotes = None
            with suppress(RemoteError):
                remotes = await stack.enter_async_context(logins(source, target))
            return StepState.DONE, [
                *await storage_cleanup.after_crash(step.intent, source, remotes)
            ]
    if before.state is None or before.migrating:
        raise HypervisorError(f"{source} does not say that the guest is there", host=source)
    async with logins(source, target) as remotes:
        left = await storage_copy.unmade(remotes, step)
    return (StepState.INTENDED if left else StepState.UNDONE), left
