"""Families of forks: the controller's part. An agent on the host starts and serves the forks."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vmckpt.agent import client
from vmckpt.agent.fork_orders import (
    DropForksOrder,
    FamiliesOrder,
    ForkChild,
    ForkOrder,
    KeepForkOrder,
)
from vmckpt.agent.results import TEXT, size
from vmckpt.errors import BadInput, HypervisorError
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.journal.cancel_requests import cancellable_job
from vmckpt.journal.recorder import JournalStepLog, recorded
from vmckpt.journal.records import NewOperation
from vmckpt.model.events import Caller, Event
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.snapshot.fork_rules import MOST, Family, Fork
from vmckpt.snapshot.request import RestoreRequest, Step
from vmckpt.snapshot.restore import domain_xml, preflight, restore
from vmckpt.snapshot.restore.restore import Opened
from vmckpt.store.format.metadata import Contents
from vmckpt.units import Bytes, Seconds

_FAMILIES = 1000
"""Maximum number of families accepted from an agent."""
_LONGEST = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedFork:
    """A fork that was to be started."""

    name: str
    uuid: str
    took: Seconds
    """Time from the order until the fork was running."""
    clock_not_set: str
    """Why the fork's clock still has the time of the snapshot; empty: it was set."""
    error: str
    """Why the fork was not started; empty: it is running."""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "uuid": self.uuid, "took_ms": round(self.took * 1000),
            "clock_not_set": self.clock_not_set, "error": self.error or None,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A family of which at least one fork was started."""

    family: str
    template: str
    """Name of the guest in the snapshot."""
    snapshot: str
    store: str
    host: str
    memory: Bytes
    """Size of the memory of each fork, which is shared until a fork writes to it."""
    took: Seconds
    forks: tuple[StartedFork, ...]
    warnings: tuple[str, ...]
    job: str | None

    @property
    def running(self) -> tuple[StartedFork, ...]:
        """The forks that were started."""
        return tuple(one for one in self.forks if not one.error)

    def as_family(self) -> Family:
        """Return the family with the forks that were started; they share everything."""
        return Family(
            id=self.family, host=self.host, template=self.template, snapshot=self.snapshot,
            store=self.store,
            forks=tuple(
                Fork(uuid=one.uuid, name=one.name, runs=True, memory=Bytes(0), disk=Bytes(0))
                for one in self.running
            ),
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return {
            "family": self.family, "guest": self.template, "snapshot": self.snapshot,
            "store": self.store, "host": self.host, "memory_bytes": self.memory,
            "took_ms": round(self.took * 1000), "forks": [one.as_json() for one in self.forks],
            "warnings": list(self.warnings), "job": self.job,
        }  # fmt: skip


def new_family() -> str:
    """Return an ID for a new family."""
    return f"fam-{secrets.token_hex(5)}"


def children(
    opened: Opened, names: Sequence[str], folder: str | None
) -> tuple[tuple[ForkChild, ...], tuple[str, ...]]:
    """Plan a fork for each name, with its links down and its disks as qcow2 overlays.

    `folder`: directory for the disks; None: next to the disks of the original guest. Returns the
    forks, which have different MAC addresses, and warnings. Raises BadInput.
    """
    public = opened.public
    if public.contents is not Contents.MEMORY:
        raise BadInput(
            f"snapshot {public.id} of {public.guest} has no memory from which forks could continue",
            hint=f"fork the running guest, or run vmckpt snapshot restore {public.id} --as NAME",
        )
    made, macs, warnings = list[ForkChild](), set[str](), dict[str, None]()
    for name in names:
        request = RestoreRequest(snapshot=public.id, fork=name, folder=folder)
        plan = restore.planned(opened, request, overlays=True)
        while macs & domain_xml.macs(plan.xml):
            plan = restore.planned(opened, request, overlays=True)
        macs |= domain_xml.macs(plan.xml)
        warnings |= dict.fromkeys(plan.warnings)
        made.append(ForkChild(guest=plan.uuid, name=name, xml=plan.xml, images=plan.images))
    return tuple(made), tuple(warnings)


async def start(
    host: Host, opened: Opened, family: str, names: Sequence[str], caller: Caller,
    *, folder: str | None,
) -> Started:  # fmt: skip
    """Start a family of forks on a host, and record this as a job.

    `family`: ID of the new family; `folder`: see `children`. Setting `caller.stop` before the forks
    are running undoes the start and raises Cancelled. Raises VmckptError, HypervisorError if no
    fork could be started.
    """
    public = opened.public
    made, said = children(opened, names, folder)
    async with client.shared_logins(host), Hypervisor(host) as hypervisor:
        warnings = (*said, *await preflight.checked(hypervisor, public, opened.private))
        # The definitions of the forks differ only in names and addresses.
        await preflight.bounded(
            hypervisor, public, opened.private,
            xml=made[0].xml, images=made[0].images, folder=folder,
        )  # fmt: skip
        place = {"family": family, "store": opened.store.name, "snapshot": public.id}
        new = NewOperation(
            kind="fork", guest=public.guest, source=host.name,
            detail={**place, "count": len(made)},
        )  # fmt: skip
        # The lease is on the family: neither the snapshot's guest nor another family is affected.
        async with (
            recorded(new, family, caller.warn) as recorder,
            cancellable_job(recorder, caller) as mine,
        ):
            intent = {**place, "guests": [one.guest for one in made]}
            await JournalStepLog(recorder).intend(Step.FORK, intent)

            def emit(event: Event) -> None:
                recorder.take(event)
                caller.emit(event)

            order = _order(host, opened, family, made)
            told = await client.run_order(host, order.as_json(), emit, mine.stop)
            with client.sensible(host):
                forks, took = started(told, made)
            done = Started(
                family=family, template=public.guest, snapshot=public.id, store=opened.store.name,
                host=host.name, memory=Bytes(public.memory), took=took, forks=forks,
                warnings=warnings, job=recorder.id,
            )  # fmt: skip
            if not done.running:
                raise HypervisorError(
                    f"no fork of {public.guest} was started on {host.name}: {forks[0].error}",
                    host=host.name, hint=f"run vmckpt doctor {host.name}",
                )  # fmt: skip
            recorder.finish(Outcome.COMPLETED, done.as_json())
            return done


def _order(host: Host, opened: Opened, family: str, made: tuple[ForkChild, ...]) -> ForkOrder:
    return ForkOrder(
        family=family, template=opened.public.guest, uri=client.LIBVIRT, host=host.name,
        store=opened.store, state=host.agent_state, snapshot=opened.public.id,
        data_key=None if opened.data_key is None else opened.data_key.hex(),
        trusted=tuple(one.hex() for one in opened.trusted), children=made, others=opened.others,
    )  # fmt: skip


def started(
    told: Mapping[str, Any], made: Sequence[ForkChild]
) -> tuple[tuple[StartedFork, ...], Seconds]:
    """Parse the result of a ForkOrder. Returns each ordered fork, and the time for all of them.

    Raises as described in the docstring of agent.results.
    """
    found = {str(one["guest"]): one for one in _listed(told["children"], MOST)}
    missing = {"took": 0, "error": "the agent did not report this fork"}
    forks = []
    for child in made:
        one = found.get(child.guest, missing)
        forks.append(StartedFork(
            name=child.name, uuid=child.guest, took=_seconds(one["took"]),
            clock_not_set=str(one.get("clock_not_set") or "")[:TEXT],
            error=str(one.get("error") or "")[:TEXT],
        ))  # fmt: skip
    return tuple(forks), _seconds(told["took"])


async def families(host: Host) -> tuple[Family, ...]:
    """Return the families on a host. Raises VmckptError."""
    order = FamiliesOrder(uri=client.LIBVIRT, host=host.name)
    told = await client.run_order(host, order.as_json(), _unheard, asyncio.Event())
    with client.sensible(host):
        return tuple(_family(host.name, one) for one in _listed(told["families"], _FAMILIES))


def _family(host: str, told: Mapping[str, Any]) -> Family:
    """Parse a family in the result of a FamiliesOrder."""
    return Family(
        id=str(told["family"])[:TEXT], host=host, template=str(told["template"])[:TEXT],
        snapshot=str(told["snapshot"])[:TEXT], store=str(told["store"])[:TEXT],
        forks=tuple(
            Fork(
                uuid=str(one["guest"])[:TEXT], name=str(one["name"])[:TEXT],
                runs=bool(one["runs"]), memory=size(one["memory_bytes"]),
                disk=size(one["disk_bytes"]),
            )
            for one in _listed(told["children"], MOST)
        ),
    )  # fmt: skip


def _seconds(told: object) -> Seconds:
    """Return a duration from an agent's answer. Raises ValueError."""
    if isinstance(told, bool) or not isinstance(told, int | float) or not 0 <= told <= _LONGEST:
        raise ValueError(f"expected a number of seconds, not {str(told)[:40]!r}")
    return Seconds(told)


def _listed(told: object, most: int) -> list[Any]:
    """Return a list from an agent's answer, cut to `most` entries. Raises TypeError."""
    if not isinstance(told, list):
        raise TypeError(f"expected a list, not {str(told)[:40]!r}")
    return told[:most]


async def drop(host: Host, uuids: Sequence[str]) -> None:
    """Destroy forks on a host and remove their disks. Raises VmckptError."""
    order = DropForksOrder(uri=client.LIBVIRT, host=host.name, guests=tuple(uuids))
    await client.run_order(host, order.as_json(), _unheard, asyncio.Event())


async def keep(host: Host, uuid: str, caller: Caller) -> None:
    """Make a fork independent of its family. Raises VmckptError, Cancelled if it was stopped."""
    order = KeepForkOrder(uri=client.LIBVIRT, host=host.name, guest=uuid)
    await client.run_order(host, order.as_json(), caller.emit, caller.stop)


def _unheard(_: Event) -> None:
    pass
