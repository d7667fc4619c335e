"""Test a snapshot by running it for a while as a fork, without network."""

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vmckpt.agent import client
from vmckpt.agent.cleanup_orders import DiscardOrder
from vmckpt.errors import Cancelled, HypervisorError, RemoteError, VmckptError
from vmckpt.hypervisor import domains, liveness, qmp
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.guest_agent import CHANNEL, GuestAgent
from vmckpt.journal import recorder as journal
from vmckpt.journal.cancel_requests import cancellable_job
from vmckpt.journal.records import NewOperation
from vmckpt.model.events import Caller
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.snapshot.request import RestoreRequest, Step
from vmckpt.snapshot.restore import restore
from vmckpt.snapshot.restore.restore import Opened
from vmckpt.snapshot.verify import heartbeat
from vmckpt.snapshot.verify.heartbeat import HeartbeatResult
from vmckpt.units import Seconds

WATCH = Seconds(10.0)
_TURN = Seconds(1.0)
_NAME = "proof"


@dataclass(frozen=True, slots=True, kw_only=True)
class Booted:
    """The result of a boot test."""

    snapshot: str
    name: str
    host: str
    lives: bool
    why: str
    took: Seconds
    job: str | None

    def as_json(self) -> dict[str, Any]:
        return {
            "snapshot": self.snapshot,
            "name": self.name,
            "host": self.host,
            "lives": self.lives,
            "why": self.why,
            "took_ms": round(self.took * 1000),
            "job": self.job,
        }


async def boot(
    host: Host, opened: Opened, folder: str | None, watch: Seconds, caller: Caller
) -> Booted:
    """Restore a snapshot as a fork, watch the fork for `watch` seconds, and remove it.

    `folder` is the directory for the fork's disks; None: next to the disks of the original guest.
    The fork is also removed if `caller.stop` is set; if this process is killed, recovery removes
    the fork. Raises Cancelled, and the errors of `restore.restore`.
    """
    began = time.monotonic()
    request = RestoreRequest(
        snapshot=opened.public.id,
        fork=f"{_NAME}-{secrets.token_hex(4)}",
        folder=folder,
    )
    name = request.fork or ""
    images = restore.planned(opened, request).images
    new = NewOperation(
        kind="proof", guest=name, source=host.name,
        detail={"store": opened.store.name, "snapshot": opened.public.id},
    )  # fmt: skip
    recorder = await asyncio.to_thread(journal.begin, new, caller.warn)
    try:
        meant = {"snapshot": opened.public.id, "fork": name, "images": images}
        await asyncio.to_thread(recorder.intend, Step.PROOF, meant)
        async with cancellable_job(recorder, caller) as mine:
            verdict = await _proved(host, opened, request, watch, mine)
        await discard(host, opened.public.id, name, images)
        booted = Booted(
            snapshot=opened.public.id, name=opened.public.name, host=host.name,
            lives=verdict.lives, why=verdict.why, took=Seconds(time.monotonic() - began),
            job=recorder.id,
        )  # fmt: skip
        outcome = Outcome.COMPLETED if verdict.lives else Outcome.FAILED
        recorder.finish(outcome, booted.as_json())
        return booted
    except VmckptError as exc:
        if await _tidied(host, opened.public.id, name, images):
            cancelled = isinstance(exc, Cancelled)
            outcome = Outcome.CANCELLED if cancelled else Outcome.FAILED
            recorder.finish(outcome, None if cancelled else {"error": str(exc)})
        raise
    finally:
        await asyncio.to_thread(recorder.close)


async def _tidied(host: Host, snapshot: str, name: str, images: Mapping[str, str]) -> bool:
    """Remove the fork after an error. Returns False on failure; recovery then removes the fork."""
    try:
        await discard(host, snapshot, name, images)
    except (HypervisorError, RemoteError):
        return False
    return True


async def _proved(
    host: Host, opened: Opened, request: RestoreRequest, watch: Seconds, caller: Caller
) -> HeartbeatResult:  # fmt: skip
    await restore.restore(host, opened, request, caller, hosts={})
    async with Hypervisor(host) as hypervisor:
        guest = await domains.find_guest(hypervisor, request.fork or "")
        if guest is None:
            return HeartbeatResult(lives=False, why="it stopped by itself")
        caller.warn(f"watching {request.fork} on {host.name} for {watch:g} s; it has no network")
        facts = opened.private.facts
        # An agent that did not answer when the snapshot was made may not be installed.
        asks = CHANNEL in facts.domain_xml
        agent = False if asks and facts.agent else None
        return await _watched(hypervisor, guest.uuid, watch, caller.stop, asks=asks, agent=agent)


async def _watched(
    hypervisor: Hypervisor, uuid: str, watch: Seconds, stop: asyncio.Event,
    *, asks: bool, agent: bool | None,
) -> HeartbeatResult:  # fmt: skip
    """Watch the guest for `watch` seconds, or until its guest agent answers.

    `asks`: whether to query the guest agent; `agent`: the value for heartbeat.evaluate unless the
    guest agent answers. Raises Cancelled.
    """
    began = time.monotonic()
    pulses = [await liveness.sample_liveness(hypervisor, uuid, Seconds(0.0))]
    try:
        await liveness.measure_writes(hypervisor, uuid, int(watch / 2))
    except HypervisorError:
        pass  # an old QEMU cannot measure writes; the other signs have to suffice
    while True:
        try:
            await asyncio.wait_for(stop.wait(), _TURN)
        except TimeoutError:
            pass
        if stop.is_set():
            raise Cancelled("stopped while watching the restored guest; the guest was removed")
        now = Seconds(time.monotonic() - began)
        pulses.append(await liveness.sample_liveness(hypervisor, uuid, now))
        over = now >= watch or bool(heartbeat.ended(pulses[-1]))
        if asks and not over and await _agent(hypervisor, uuid):
            agent = True
        if over or agent:
            return heartbeat.evaluate(pulses, agent=agent)


async def _agent(hypervisor: Hypervisor, uuid: str) -> bool:
    def ping(one: qmp.DomainCaller) -> bool:
        return GuestAgent(one).there(limit=Seconds(2.0))

    try:
        return await qmp.call_on_domain(
            hypervisor, uuid, "asking the guest agent", ping, changes=False
        )
    except HypervisorError:
        return False


async def discard(host: Host, snapshot: str, name: str, images: Mapping[str, str]) -> None:
    """Destroy the guest of a boot test and remove its images; may be repeated.

    `snapshot`: the ID of the tested snapshot; `name`: the test guest's name; `images`: path of the
    image of each disk. Raises VmckptError.
    """
    async with Hypervisor(host) as hypervisor:
        await domains.remove(hypervisor, name)
    order = DiscardOrder(snapshot=snapshot, images=images)
    await client.run_order(host, order.as_json(), lambda _: None, asyncio.Event())
