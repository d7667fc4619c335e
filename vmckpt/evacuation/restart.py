"""Decide which of the guests stopped by an evacuation are started again on their host. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from vmckpt.errors import run_doctor, some
from vmckpt.evacuation.plan.capacity import CapacityModel
from vmckpt.evacuation.plan.fleet import Rules, Tenant
from vmckpt.evacuation.plan.inventory import FleetView, TravelMethod, started
from vmckpt.evacuation.plan.placement import Unplaced
from vmckpt.evacuation.task import Task
from vmckpt.units import Bytes, show_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPlan:
    """The guests to be started, and the reason for each guest that is not started."""

    starts: Mapping[str, Tenant]
    """Guests to be started, by UUID, with the memory and CPUs that they will use."""
    left: tuple[Unplaced, ...] = ()
    elsewhere: tuple[str, ...] = ()
    """Messages about guests that are now running or defined on another host."""


def decide(task: Task, seen: FleetView) -> RestartPlan:
    """Decide which guests are started, based on the current state.

    A guest is not started if it may be running elsewhere, or if its memory no longer fits. Other
    placement limits are ignored, since they would keep the guest shut off.
    """
    by_uuid = {one.guest.uuid: one for one in seen.known.values()}
    named = dict(task.called)
    capacity = CapacityModel(
        seen.fleet.places, tuple(one for one in seen.fleet.tenants if not _off(one, task, seen)),
        Rules(keep_free=0.0),
    )  # fmt: skip
    starts: dict[str, Tenant] = {}
    left: list[Unplaced] = []
    elsewhere: list[str] = []
    for uuid in sorted(task.start):
        known = by_uuid.get(uuid)
        if known is None:
            left.append(_left(named.get(uuid, uuid), task.host, _lost(uuid, seen), ""))
        elif known.host != task.host:
            does = "is defined" if known.way is TravelMethod.OFFLINE else "is running"
            elsewhere.append(f"{known.name} {does} on {known.host}; not started on {task.host}")
        elif known.way is not TravelMethod.OFFLINE:
            continue  # it is already running there
        elif silent := sorted(seen.silent):
            why = f"it may be running on a host that does not answer: {some(silent)}"
            left.append(
                _left(
                    known.name,
                    task.host,
                    why,
                    f"{run_doctor(silent)}, then start the guest",
                )
            )
        else:
            of = next(one for one in seen.fleet.tenants if one.name == known.name)
            tenant, at = started(of, known.guest), capacity.index[task.host]
            if (short := capacity.shortage(tenant, at)) > 0:
                why = f"the host needs {show_bytes(round(short))} more free memory"
                left.append(_left(known.name, task.host, why, ""))
                continue
            capacity.place(tenant, at)
            starts[uuid] = tenant
    return RestartPlan(starts=starts, left=tuple(left), elsewhere=tuple(elsewhere))


def _off(tenant: Tenant, task: Task, seen: FleetView) -> bool:
    known = seen.known.get(tenant.name)
    return known is not None and known.host == task.host and known.guest.uuid in task.start


def _lost(uuid: str, seen: FleetView) -> str:
    if names := seen.stuck.get(uuid):
        stays = {one.name: one.stays for one in seen.fleet.tenants}
        return f"{names[0]}: {stays.get(names[0])}"
    if seen.silent:
        return f"not found; no answer from {some(sorted(seen.silent))}"
    return "it is not defined on any host"


def _left(name: str, host: str, why: str, hint: str) -> Unplaced:
    tenant = Tenant(name=name, host=host, memory=Bytes(0), cpus=0.0)
    return Unplaced(
        tenant=tenant, why=f"not started: {why}", hint=hint or f"run virsh start {name} on {host}"
    )
