"""Move guests that are off: their definitions, and the disks that the new host does not share.

A problem would show only when the guest is started on the new host, perhaps months later. So every
file that the guest writes to must be known to be the same on both hosts, or is copied.
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
from vmckpt.model.host import ADD_SSH_TO_BOTH, Host
from vmckpt.model.migration import JobPhase, JobSample
from vmckpt.policy.model import CopyKind
from vmckpt.remote import image_copy, images, probe
from vmckpt.units import Bytes, BytesPerSecond, Seconds

IMAGES = "images"
"""Journal step for new images on another host; if the step is open, the images may have to be
removed."""
_NOTHING = CopyPlan()
_SLOWER, _SETUP = 1.5, Seconds(5.0)
"""A copy may get less bandwidth than was measured, and creating images and logging in take time: in
a lab with no idle core, 40 and 100 MiB over 50 Mbit/s took 2.6 and 3.8 s longer than the bandwidth
alone would require."""
Tell = Callable[[Sampled], None]
Logins = Callable[[str, str], AbstractAsyncContextManager[Remotes | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Both hosts of a move; `remotes` is None if one of them has no ssh login."""

    source: Host
    target: Host
    remotes: Remotes | None


async def check_move(known: Known, ends: Ends, links: Links) -> Checked:
    """Check a move. Returns its findings and, if the link was measured, the expected duration."""
    try:
        found = await plan_copies(known, ends)
    except VmckptError as exc:
        found = CopyPlan(findings=(_unseen(ends.target.name, exc.message, exc.hint),))
    if found.copies and not preflight.blockers(found.findings):
        link, _ = await links.between(ends.source, ends.target, ends.remotes)
        return _forecast(known, found, None if link is None else link.rate)
    return _checked(known, found)


def _forecast(known: Known, found: CopyPlan, link: BytesPerSecond | None) -> Checked:
    """Return the result with durations for the measured bandwidth and for a lower bandwidth."""
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
    """Return the copies that the guest's policy requires, and findings.

    Raises HypervisorError, RemoteError, BadInput.
    """
    overrides, guest = known.policy.storage, known.guest
    if overrides.copy is CopyKind.SHARED:
        return _NOTHING
    if ends.remotes is None:
        why = f"disks are copied over ssh, but {ends.source.name} or {ends.target.name}"
        hint = f"{ADD_SSH_TO_BOTH}, or share the guest's disks"
        return CopyPlan(findings=(_unseen(ends.target.name, f"{why} has no ssh login", hint),))
    async with Hypervisor(ends.source) as here, Hypervisor(ends.target) as there:
        drives = await storage.drives(here, guest.uuid)
        wish = await storage_copy.wish_of(overrides, there)
    files = set(all_files(guest))
    if guest.nvram is not None:
        place = (await images.places(ends.remotes[0], [guest.nvram]))[guest.nvram]
        if place.exists or not place.writable:  # the file may exist in an unreadable directory
            drives = (*drives, _nvram(guest.nvram))
        else:
            files.discard(guest.nvram)  # libvirt creates it at the first start of the guest
    same = await probe.same_files(*ends.remotes, sorted(files))
    found = await storage_copy.plan_copies(*ends.remotes, drives, same, wish)
    # This includes the backing files of a disk that both hosts see.
    unseen = [one for one in sorted(files) if not same.get(one) and one not in found.left_behind]
    if not unseen or preflight.blockers(found.findings):
        return found
    why = f"{unseen[0]} is not copied, and might be a different file on the target"
    return replace(found, findings=(*found.findings, _unseen(ends.target.name, why, None)))


def _nvram(path: str) -> Drive:
    return Drive(
        name=NVRAM, kind="file", device=NVRAM, path=path, format="raw", read_only=False,
        encrypted=False,
    )  # fmt: skip


def _unseen(where: str, text: str, hint: str | None) -> Finding:
    return Finding(
        code="disks-not-seen", severity=Severity.BLOCKER, where=where, text=text,
        hint=hint or "share the guest's disks between the hosts",
    )  # fmt: skip


async def move(
    known: Known, ends: Ends, recorder: Recorder, stop: asyncio.Event, tell: Tell
) -> tuple[str, ...]:
    """Move a guest that is off. Returns warnings that do not prevent its start on the target.

    `recorder`: of the job; setting `stop` cancels the copy; `tell` receives its progress. Raises
    HypervisorError, RemoteError, BadInput or Cancelled if the guest is still on its source: images
    that remain on the target stay recorded, for undo_left. Raises OutcomeUnknown if both hosts must
    be checked; JournalError; LeaseLost.
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
    """The images that move with one guest."""

    def __init__(
        self, known: Known, target: Host, remotes: Remotes, recorder: Recorder, plan: CopyPlan
    ) -> None:
        self._known, self._target, self._plan = known, target, plan
        self._here, self._there = remotes
        self._recorder = recorder
        self._made = Made(host=target.name, suffix=storage_copy.new_suffix())
        # An interrupted preparation may leave images under temporary names of these paths.
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
                host = here.host.name
                raise HypervisorError(
                    f"{host}: the guest's disks were written to during the copy", host=host
                )
            _, stored = await storage.definitions_with_images_at(here, uuid, self._plan.placed)
            here.check_lease = self._recorder.check
            self._ordered = True
            await lifecycle.move_offline(here, uuid, self._target.uri_for_peers, stored)
        except LeaseLost:
            raise
        except BaseException:
            # Once libvirt was asked to move the guest, both hosts must be checked before images
            # are removed.
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
        except JournalError as exc:  # the guest has arrived nevertheless
            return (*troubles, exc.message)
        return troubles

    async def _unwritten(self, old: dict[str, str], before: str) -> dict[str, str]:
        """Return `old`; if the images may have been written to, a reason to keep each of them.

        Until libvirt has finished, only QEMU's lock keeps other processes from writing to the
        images.
        """
        with suppress(RemoteError):
            if await images.stamps(self._here, self._plan.left_behind) == before:
                return old
        return dict.fromkeys(old, f"{images.UNFIT}it may have been written to after the copy")

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
        """Copy all contents under temporary names, before any image gets its final path."""
        made = await storage_copy.prepare(self._there, self._plan, self._made.suffix)
        self._made.marks.update(made.marks)
        marks = {"marks": dict(made.marks)}
        await asyncio.to_thread(self._recorder.conclude, self._step, StepState.INTENDED, marks)
        to = self._target.address_for_peers
        assert to is not None  # a host with an ssh login has an address
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
        """Remove the images. Images that cannot be removed now stay recorded; see `undo_left`."""
        with suppress(VmckptError):
            if not await storage_copy.remove(self._there, self._made):
                await asyncio.to_thread(self._recorder.conclude, self._step, StepState.UNDONE)


def progress(done: Bytes, total: Bytes, began: Seconds, now: Seconds) -> Sampled:
    """Return the progress of a copy in the form of a migration sample. Pure.

    `done`: bytes copied so far; `began`, `now`: in monotonic seconds.
    """
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
    """Return open image steps left by failed moves or a dead controller. Raises JournalError."""
    with jobs.open_journal() as journal:
        steps = journal.steps(job)
    return [one for one in steps if one.name == IMAGES and one.state is StepState.INTENDED]


async def undo_left(
    steps: Sequence[StoredStep], host: Callable[[str], Host], logins: Logins, recorder: Recorder
) -> tuple[str, ...]:
    """Settle open image steps. Returns messages about steps that could not be settled.

    `host`: returns the host with a name; `recorder`: of the job whose steps these are. Images stay
    if the guest is on the target, and are removed if the guest is known to be on the source. If the
    guest is on neither host, it may have moved on from the target with its images, so the images
    stay.

    Raises LeaseLost if another controller has taken over the job.
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
            troubles.append(f"{target} may have {paths} from an unfinished move: {exc.message}")
    return tuple(troubles)


async def _settle(
    step: StoredStep, here: Hypervisor, there: Hypervisor, logins: Logins
) -> tuple[StepState, list[str]]:
    """Settle one step.

    `here`, `there`: the source and the target. Returns the step's new state and messages about
    images that stay. Raises HypervisorError, RemoteError.
    """
    source, target, uuid = here.host.name, there.host.name, str(step.intent["uuid"])
    before = await domains.presence(here, uuid)
    found = await domains.presence(there, uuid)
    if not found.reachable:
        raise HypervisorError(f"{target} does not answer", host=target)
    if found.state is not None:
        async with AsyncExitStack() as stack:
            # Once the guest has arrived, do not wait for a source that does not answer.
            remotes = None
            with suppress(RemoteError):
                remotes = await stack.enter_async_context(logins(source, target))
            return StepState.DONE, [
                *await storage_cleanup.after_crash(step.intent, source, remotes)
            ]
    if before.state is None or before.migrating:
        if not before.reachable:
            why = f"{source} does not answer"
        elif before.state is None:
            why = f"neither {source} nor {target} has the guest"
        else:
            why = f"the guest is being migrated from {source}"
        raise HypervisorError(why, host=source)
    async with logins(source, target) as remotes:
        left = await storage_copy.unmade(remotes, step)
    return (StepState.INTENDED if left else StepState.UNDONE), left
