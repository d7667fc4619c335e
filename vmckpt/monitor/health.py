"""The health of hosts, jobs, protections and stores, as Prometheus gauges and as problems. Pure.

Names and units follow Prometheus's conventions: seconds, bytes, ratios from 0 to 1, and times as
seconds since 1970.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from vmckpt.journal.evacuation_progress import Turn, summary
from vmckpt.journal.jobs import JobView
from vmckpt.model.guest import MEND, Copies, FleetNow, SnapshotNow, merged
from vmckpt.model.migration import JobPhase
from vmckpt.protection import status
from vmckpt.protection.copies import of_protections

_PREFIX = "vmckpt"
Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSnapshot:
    """The state of hosts, jobs, protections and stores, as far as known at one instant.

    A part that was never read is None or empty.
    """

    fleet: FleetNow | None = None
    jobs: Sequence[JobView] | None = None
    """Active jobs."""
    turns: Mapping[str, Sequence[Turn]] = field(default_factory=lambda: MappingProxyType({}))
    """The migrations of each job for all guests of a host, by job ID."""
    protections: Mapping[str, Mapping[str, Any]] | None = None
    snapshots: Sequence[SnapshotNow] | None = None
    looked: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """When each part was last read without an error, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A problem that needs an operator's attention."""

    text: str
    hint: str
    job: str | None = None
    guest: str | None = None
    host: str | None = None


def families(now: HealthSnapshot) -> Iterator[Metric]:
    """Yield all gauges of the parts that are known."""
    yield _family(
        "last_look_timestamp_seconds", "Time of the last successful poll.",
        ("what",), (((what,), at) for what, at in now.looked.items()),
    )  # fmt: skip
    if now.fleet is not None:
        yield from _hosts(now.fleet)
    if now.fleet is not None or now.protections is not None:
        yield _copies(now)
    if now.jobs is not None:
        yield from _jobs(now.jobs)
        yield from _moves(now.jobs)
    yield _evacuations(now)
    if now.protections is not None:
        yield from _protections(now.protections)
    if now.snapshots is not None:
        yield from _snapshots(now.snapshots)


def _family(
    name: str, text: str, labels: Labels, values: Iterable[tuple[Labels, float | None]]
) -> Metric:
    """Return one gauge, without the series that have no value.

    `values`: label values and value of each series.
    """
    family = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=labels)
    for told, value in values:
        if value is not None:
            family.add_metric(told, float(value))
    return family


def _hosts(fleet: FleetNow) -> Iterator[Metric]:
    hosts = fleet.hosts
    up = [one for one in hosts if one.error is None]
    yield _family("host_up", "Whether the host's libvirt answers.", ("host",),
                  (((one.name,), one.error is None) for one in hosts))  # fmt: skip
    yield _family("host_maintenance", "Whether the host is in maintenance.", ("host",),
                  (((one.name,), one.closed is not None) for one in hosts))  # fmt: skip
    yield _family("host_memory_bytes", "The host's memory.", ("host",),
                  (((one.name,), one.memory) for one in up))  # fmt: skip
    yield _family("host_memory_available_bytes", "Memory that is free or can be reclaimed.",
                  ("host",), (((one.name,), one.free) for one in up))  # fmt: skip
    counted = Counter((one.host, str(one.state)) for one in fleet.guests)
    yield _family("host_guests", "Guests on the host, by state.", ("host", "state"),
                  counted.items())  # fmt: skip


def two_copies(now: HealthSnapshot) -> tuple[Copies, ...]:
    """Return guests that have two copies, according to libvirt or to the agents."""
    seen = () if now.fleet is None else now.fleet.copies
    return merged(seen, of_protections((now.protections or {}).values()))


def _copies(now: HealthSnapshot) -> Metric:
    rows = (((one.guest, one.uuid, " ".join(one.hosts)), len(one.hosts)) for one in two_copies(now))
    return _family("guest_copies", "Number of hosts that run, or may run, a guest, if more than"
                   " one.", ("guest", "uuid", "hosts"), rows)  # fmt: skip


def _jobs(jobs: Sequence[JobView]) -> Iterator[Metric]:
    counted = Counter(
        (one.operation.kind, "unattended" if one.unattended else str(one.operation.state))
        for one in jobs
    )
    yield _family("jobs", "Active jobs; state `unattended`: the controller is gone.",
                  ("kind", "state"), counted.items())  # fmt: skip


_SAMPLED = (
    ("remaining", "remaining_bytes", "Bytes that a running migration still has to send."),
    ("dirty_rate", "dirty_bytes_per_second", "Dirty rate of a guest that is being migrated."),
    ("bandwidth", "bandwidth_bytes_per_second", "Rate at which a running migration sends data."),
    ("iteration", "iteration", "Current pass over memory of a running migration."),
    ("done", "done_ratio", "Share of a running migration that is done."),
)


def _moves(jobs: Sequence[JobView]) -> Iterator[Metric]:
    found = [
        (_labels(one), one.sample.values)
        for one in jobs if one.sample is not None and one.operation.kind == "migrate"
    ]  # fmt: skip
    labels = ("job", "guest", "source", "target")
    for key, name, text in _SAMPLED:
        values = [(told, sample.get(key)) for told, sample in found]
        yield _family(f"migration_{name}", text, labels, values)
    throttled = [(told, (sample.get("throttle") or 0) / 100) for told, sample in found]
    yield _family("migration_throttle_ratio", "Share of CPU time that auto-converge takes from the"
                  " guest.", labels, throttled)  # fmt: skip


def _labels(view: JobView) -> Labels:
    one = view.operation
    return one.id, one.guest, one.source or "", one.target or ""


def _evacuations(now: HealthSnapshot) -> Metric:
    rows: list[tuple[Labels, float | None]] = []
    for view in now.jobs or ():
        one = view.operation
        if one.id in now.turns:
            told = summary(now.turns[one.id])
            counted = {
                "arrived": told.arrived, "moving": told.moving, "waiting": told.waiting,
                "failed": told.failed,
            }  # fmt: skip
            rows += [
                ((one.id, one.kind, one.source or "", state), count)
                for state, count in counted.items()
            ]
    return _family("evacuation_guests", "Guests of a running evacuation, repopulation or"
                   " balancing, by state.", ("job", "kind", "host", "state"), rows)  # fmt: skip


_PROTECTED = (
    ("behind_s", "behind_seconds", "Time that would be lost if the host failed now (RPO)."),
    ("pause_s", "pause_seconds", "Median pause of the guest in an epoch, over the latest epochs."),
    ("interval_s", "interval_seconds", "Time between two epochs."),
    ("output_delay_s", "output_delay_seconds", "How long the guest's output is buffered."),
    ("packets_lost", "packets_lost", "Guest packets lost since the protection began."),
)


def _protections(entries: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    found = [
        ((str(one["guest"]), str(one["primary"]), str(one["backup"])), status.parse_status(one))
        for one in entries.values()
    ]
    labels = ("guest", "primary", "backup")
    yield _family("protection_ready", "Whether the standby can take over.", labels,
                  ((told, look.ready) for told, look in found))  # fmt: skip
    for key, name, text in _PROTECTED:
        values = [(told, look.as_json()[key]) for told, look in found]
        yield _family(f"protection_{name}", text, labels, values)


def _snapshots(snapshots: Sequence[SnapshotNow]) -> Iterator[Metric]:
    silent = {one.store for one in snapshots if not one.id}
    known = [one for one in snapshots if one.id]
    stores = sorted({one.store for one in snapshots})
    yield _family("store_up", "Whether the store can be read.", ("store",),
                  (((one,), one not in silent) for one in stores))  # fmt: skip
    counted = Counter((one.store,) for one in known)
    yield _family("snapshots", "Snapshots in the store.", ("store",), counted.items())
    damaged = Counter((one.store,) for one in known if _damaged(one))
    yield _family(
        "snapshots_damaged",
        "Snapshots that cannot be read, are not trusted, or were found damaged by a check.",
        ("store",), (((one,), damaged[one,]) for one in stores if one not in silent),
    )  # fmt: skip
    labels = ("guest", "store")
    whole = [one for one in known if not _damaged(one)]
    yield _family("snapshot_newest_timestamp_seconds", "Time of the guest's newest snapshot.",
                  labels, _newest(whole, lambda one: one.made_at))  # fmt: skip
    proved = [one for one in whole if one.verified_at is not None]
    yield _family(
        "snapshot_verified_timestamp_seconds",
        "When a snapshot of the guest was last verified as intact.",
        labels, _newest(proved, lambda one: one.verified_at or 0.0),
    )  # fmt: skip


def _damaged(one: SnapshotNow) -> bool:
    return bool(one.id) and not one.good


def _newest(
    snapshots: Sequence[SnapshotNow], when: Any
) -> Iterable[tuple[Labels, float | None]]:  # fmt: skip
    newest: dict[Labels, float | None] = {}
    for one in snapshots:
        if one.guest:
            key = (one.guest, one.store)
            newest[key] = max(newest.get(key) or 0.0, when(one))
    return newest.items()


def troubles(now: HealthSnapshot) -> Mapping[str, Trouble]:
    """Return the current problems by key. A problem keeps its key while it lasts."""
    found: dict[str, Trouble] = {}
    for host in () if now.fleet is None else now.fleet.hosts:
        if host.error is not None and host.closed is None:
            found[f"host {host.name}"] = Trouble(
                text=f"host {host.name} does not answer: {host.error}",
                hint=f"run vmckpt doctor {host.name}", host=host.name,
            )  # fmt: skip
    for twice in two_copies(now):
        found[f"copies {twice.uuid}"] = Trouble(
            text=f"two copies: {twice.text}", hint=MEND, guest=twice.guest, host=twice.hosts[0]
        )
    for view in now.jobs or ():
        if view.unattended:
            one = view.operation
            found[f"job {one.id}"] = Trouble(
                text=f"{one.id} ({one.kind} of {one.guest}) is orphaned: its controller is gone",
                hint="run vmckpt recover", job=one.id, guest=one.guest,
            )  # fmt: skip
        elif view.operation.phase == JobPhase.POST_COPY_PAUSED:
            one = view.operation
            found[f"stream {one.id}"] = Trouble(
                text=f"{one.guest} is paused: its post-copy migration to {one.target} is broken and"
                " is being retried; nothing is lost",
                hint=f"fix the network between {one.source} and {one.target}",
                job=one.id, guest=one.guest,
            )  # fmt: skip
    for job, entry in (now.protections or {}).items():
        if (wrong := _wrong_protection(job, entry)) is not None:
            found[f"protection {job}"] = wrong
    for snapshot in now.snapshots or ():
        found |= _wrong_in_store(snapshot)
    return found


def _wrong_protection(job: str, entry: Mapping[str, Any]) -> Trouble | None:
    look, guest, backup = status.parse_status(entry), str(entry["guest"]), str(entry["backup"])
    if look.ready and look.end is None:
        return None
    if look.end is not None:
        text = f"{guest} is no longer protected: {look.end}"
    else:
        text = f"the standby of {guest} on {backup} cannot take over: {look.ready_why}"
    hint = look.next_step or "run vmckpt status"
    return Trouble(text=text, hint=hint, job=job, guest=guest, host=backup)


def _wrong_in_store(one: SnapshotNow) -> dict[str, Trouble]:
    if not one.id:
        text, hint = f"store {one.store} cannot be read: {one.wrong}", "run vmckpt snapshot list"
        return {f"store {one.store}": Trouble(text=text, hint=hint)}
    if not _damaged(one):
        return {}
    text = f"snapshot {one.id} of {one.guest} in {one.store}: {one.wrong or one.verified}"
    at = f"--store {one.store}"
    hint = (
        f"run vmckpt snapshot verify {one.id} {at}; if damaged, run vmckpt snapshot verify {at}"
        " --repair --from STORE"
    )
    return {f"snapshot {one.store} {one.id}": Trouble(text=text, hint=hint, guest=one.guest)}
