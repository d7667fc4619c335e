"""Rows and columns of the dashboard's tables. Pure."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from vmckpt.errors import PolicyError
from vmckpt.journal import wording
from vmckpt.journal.jobs import JobView
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.guest import GuestNow, GuestState, HostNow, SnapshotNow
from vmckpt.policy import select
from vmckpt.policy.model import Policy
from vmckpt.policy.select import Subject
from vmckpt.protection import status
from vmckpt.protection.copies import of_protections
from vmckpt.replication.session import ProtectionOutcome
from vmckpt.units import show_bytes, show_seconds
from vmckpt_tui.actions import Model
from vmckpt_tui.wording import ago, bar

T = TypeVar("T")
Cell = tuple[str, str]
"""A text and its tone: "", "good", "warn", "bad", "dim" or "bold"."""
TONES = ("good", "warn", "bad", "dim", "bold")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Generic[T]):
    """A column of a table."""

    label: str
    cell: Callable[[T], Cell]
    order: Callable[[T], object] | None = None
    """Returns the sort key of a row; None: the column cannot be sorted."""
    width: int = 8
    grows: int = 0
    """Share of the remaining width that the column gets."""
    right: bool = False
    from_width: int = 0
    """Minimum width of the table at which the column is shown."""


_STATES: Mapping[str, Cell] = {
    GuestState.RUNNING: ("▶ running", "good"),
    GuestState.BLOCKED: ("▶ blocked", "good"),
    GuestState.PAUSED: ("‖ paused", "warn"),
    GuestState.SHUT_OFF: ("○ off", "dim"),
    GuestState.CRASHED: ("✗ crashed", "bad"),
    GuestState.STANDBY: ("◌ standby", "dim"),
    GuestState.TEST: ("◌ test", "dim"),
}
_BAD = ("failed", "lost", "unknown", "postcopy-paused", "unattended")


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Facts about guests and hosts that each row looks up."""

    now: float
    model: Model
    """The data that the index was built from."""
    jobs: Mapping[str, JobView]
    """Active jobs other than protections, by the guest's UUID."""
    standing: Mapping[str, Cell]
    """The state of protections, by the guest's UUID."""
    snapshots: Mapping[str, float]
    """Time of the last intact snapshot, by the guest's UUID."""
    running: Mapping[str, int]
    """Number of active guests, by host."""
    twice: frozenset[str]
    """UUIDs of the guests that have two copies."""


def index(model: Model, now: float, before: Index | None = None) -> Index:
    """Return the index of a model. Parts of `before` are reused if their data is unchanged."""
    if before is None or model.fleet.guests is not before.model.fleet.guests:
        running: Mapping[str, int] = Counter(
            one.host for one in model.fleet.guests if one.state.is_active
        )
    else:
        running = before.running
    if before is None or model.snapshots is not before.model.snapshots:
        last = _last(model.snapshots)
    else:
        last = before.snapshots
    standing = {
        one.operation.guest_uuid or "": ("protected", "")
        for one in model.active if one.operation.kind == "protect"
    }  # fmt: skip
    standing |= {str(one["uuid"]): guarded(one) for one in model.protections.values()}
    return Index(
        now=now,
        model=model,
        jobs={
            one.operation.guest_uuid: one
            for one in model.active
            if one.operation.guest_uuid and one.operation.kind != "protect"
        },
        standing=standing,
        snapshots=last,
        running=running,
        twice=frozenset(one.uuid for one in model.copies),
    )


def _last(snapshots: Sequence[SnapshotNow]) -> Mapping[str, float]:
    """Return the time of each guest's last intact snapshot."""
    last: dict[str, float] = {}
    for one in snapshots:
        if one.good:
            last[one.guest_uuid] = max(one.made_at, last.get(one.guest_uuid, 0.0))
    return last


def guarded(entry: Mapping[str, object]) -> Cell:
    """Return the state of a protection in one or two words."""
    if of_protections([entry]):
        return "✗ 2 copies", "bad"
    seen = status.parse_status(entry)
    if seen.end is not None:
        over = seen.phase == ProtectionOutcome.FAILED_OVER
        return ("! failed over", "warn") if over else ("✗ ended", "bad")
    if not seen.ready:
        return "! not ready", "warn"
    behind = "" if seen.behind_s is None else f" {show_seconds(seen.behind_s)}"
    return f"✓{behind}", "good"


class Finder:
    """Finds guests by words. The searchable text is built once per list of guests: for 20,000
    guests, building the text takes longer than searching it."""

    def __init__(self) -> None:
        self._guests: Sequence[GuestNow] = ()
        self._hays: Sequence[str] = ()

    def matching(self, guests: Sequence[GuestNow], text: str) -> Sequence[GuestNow]:
        """Return the guests whose name, host, state, UUID and labels contain every word."""
        words = text.casefold().split()
        if not words:
            return guests
        if guests is not self._guests:
            self._guests, self._hays = guests, [_hay(one) for one in guests]
        return [
            one for one, hay in zip(guests, self._hays, strict=True)
            if all(word in hay for word in words)
        ]  # fmt: skip


def _hay(guest: GuestNow) -> str:
    labels = " ".join(f"{key}={value}" for key, value in guest.labels.items())
    return f"{guest.name}\0{guest.host}\0{guest.state}\0{guest.uuid}\0{labels}".casefold()


def _host_state(host: HostNow) -> Cell:
    if host.error is not None:
        return f"✗ {host.error}", "bad"
    if host.closed is not None:
        return f"! {host.closed}", "warn"
    return "✓ open", "good"


def _busy(host: HostNow) -> Cell:
    if host.busy is None:
        return "–", "dim"
    return f"{host.busy:.0%}", "warn" if host.busy > 0.9 else ""


def host_columns(look: Callable[[], Index]) -> Sequence[Column[HostNow]]:
    """Return the columns of the list of hosts."""

    def used(host: HostNow) -> float:
        return 1 - host.free / host.memory if host.memory else 0.0

    def load(host: HostNow) -> Cell:
        if not host.memory:
            return "–", "dim"
        tone = "warn" if used(host) > 0.9 else ""
        return f"{bar(used(host), 10)} {used(host):4.0%}", tone

    def running(host: HostNow) -> int:
        return look().running.get(host.name, 0)

    def known(host: HostNow, text: str) -> Cell:
        return (text, "") if host.memory else ("–", "dim")

    return (
        Column(label="host", width=12, grows=2, cell=lambda one: (one.name, ""),
               order=lambda one: one.name),
        Column(label="memory used", width=15, cell=load, order=used),
        Column(label="free", width=8, right=True, order=lambda one: one.free,
               cell=lambda one: known(one, show_bytes(one.free))),
        Column(label="of", width=8, right=True, order=lambda one: one.memory, from_width=100,
               cell=lambda one: known(one, show_bytes(one.memory))),
        Column(label="CPUs", width=4, right=True, order=lambda one: one.cpus, from_width=100,
               cell=lambda one: known(one, str(one.cpus))),
        Column(label="busy", width=4, right=True, order=lambda one: one.busy or 0.0, cell=_busy),
        Column(label="guests", width=6, right=True, order=running,
               cell=lambda one: known(one, str(running(one)))),
        Column(label="state", width=12, grows=3, cell=_host_state,
               order=lambda one: (one.error or "", one.closed or "")),
    )  # fmt: skip


def guest_columns(look: Callable[[], Index]) -> Sequence[Column[GuestNow]]:
    """Return the columns of the list of guests."""

    def job(guest: GuestNow) -> Cell:
        found = look().jobs.get(guest.uuid)
        if found is None:
            return "", ""
        done = "" if found.sample is None else f" {found.sample.done:.0%}"
        tone = "bad" if found.unattended else "bold"
        return f"{found.operation.id}{done}", tone

    def state(guest: GuestNow) -> Cell:
        if guest.uuid in look().twice and guest.state.is_active:
            return "✗ 2 copies", "bad"
        return _STATES.get(guest.state, (f"? {guest.state}", "warn"))

    def snapshot(guest: GuestNow) -> Cell:
        last = look().snapshots.get(guest.uuid)
        return ("–", "dim") if last is None else (f"{ago(last, look().now)} ago", "")

    return (
        Column(label="guest", width=14, grows=3, cell=lambda one: (one.name, ""),
               order=lambda one: one.name),
        Column(label="state", width=10, order=lambda one: one.state, cell=state),
        Column(label="host", width=10, grows=1, cell=lambda one: (one.host, ""),
               order=lambda one: (one.host, one.name)),
        Column(label="memory", width=8, right=True, order=lambda one: one.memory,
               cell=lambda one: (show_bytes(one.memory), "")),
        Column(label="CPUs", width=4, right=True, order=lambda one: one.vcpus, from_width=100,
               cell=lambda one: (str(one.vcpus), "")),
        Column(label="standby", width=11, order=lambda one: look().standing.get(one.uuid, ("", "")),
               cell=lambda one: look().standing.get(one.uuid, ("–", "dim"))),
        Column(label="snapshot", width=10, order=lambda one: look().snapshots.get(one.uuid, 0.0),
               cell=snapshot, from_width=100),
        Column(label="job", width=11, cell=job, order=job),
        Column(label="labels", width=10, grows=2, from_width=130,
               cell=lambda one: (" ".join(f"{k}={v}" for k, v in one.labels.items()), "dim")),
    )  # fmt: skip


def job_columns(clock_: Callable[[], float]) -> Sequence[Column[JobView]]:
    """Return the columns of the list of jobs. `clock_`: returns the time now."""

    def state(view: JobView) -> Cell:
        doing = view.doing
        if doing in _BAD:
            return f"✗ {doing}", "bad"
        if view.operation.active:
            return f"▶ {doing}", "good"
        return (f"✓ {doing}", "") if doing == "completed" else (f"· {doing}", "dim")

    def done(view: JobView) -> Cell:
        if view.sample is None:
            return "", "dim"
        return f"{view.sample.done:.0%}", ""

    return (
        Column(label="job", width=7, cell=lambda one: (one.operation.id, "bold"),
               order=lambda one: one.operation.id),
        Column(label="guest", width=10, grows=2, cell=lambda one: (one.operation.guest, ""),
               order=lambda one: one.operation.guest),
        Column(label="from → to", width=18, grows=2, cell=lambda one: (one.operation.way, ""),
               order=lambda one: one.operation.way),
        Column(label="state", width=14, cell=state, order=lambda one: one.doing),
        Column(label="done", width=4, right=True, cell=done,
               order=lambda one: 0.0 if one.sample is None else one.sample.done),
        Column(label="began", width=12, order=lambda one: -one.operation.began_at,
               cell=lambda one: (wording.clock(one.operation.began_at, clock_()), "")),
        Column(label="by", width=10, grows=1, from_width=100,
               cell=lambda one: (one.operation.asked_by, "dim"),
               order=lambda one: one.operation.asked_by),
        Column(label="policy", width=10, grows=1, from_width=120,
               cell=lambda one: (one.operation.policy or "", "dim")),
    )  # fmt: skip


def jobs_matching(jobs: Sequence[JobView], text: str) -> Sequence[JobView]:
    """Return the jobs whose row contains every word."""
    words = text.casefold().split()

    def hay(view: JobView) -> str:
        one = view.operation
        told = (one.id, one.kind, one.guest, one.way, view.doing, one.asked_by, one.policy or "")
        return "\0".join(told).casefold()

    return [one for one in jobs if all(word in hay(one) for word in words)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A snapshot in the tree of its guest."""

    snapshot: SnapshotNow
    depth: int


def leaves(snapshots: Sequence[SnapshotNow], text: str = "") -> Sequence[Leaf]:
    """Return snapshots sorted by store and guest, each child below its parent.

    A snapshot whose parent is missing is a root. `text`: words that a snapshot must contain.
    """
    words = text.casefold().split()
    chosen = [
        one for one in snapshots
        if all(word in f"{one.guest} {one.name} {one.id} {one.store}".casefold() for word in words)
    ]  # fmt: skip
    there = {(one.store, one.id): one.made_at for one in chosen}
    below: dict[tuple[str, str | None], list[SnapshotNow]] = {}
    for one in sorted(chosen, key=lambda one: (one.store, one.guest, one.made_at)):
        made = there.get((one.store, one.parent or ""), math.inf)
        # A parent that is later than its child is ignored: a cycle would have no root.
        parent = one.parent if (made, one.parent or "") < (one.made_at, one.id) else None
        below.setdefault((one.store, parent), []).append(one)
    found: list[Leaf] = []
    # A long chain would be too deep for recursion.
    waiting = [
        (one, 0) for (_, parent), some in sorted(below.items(), key=lambda x: x[0][0])
        if parent is None for one in some
    ][::-1]  # fmt: skip
    while waiting:
        one, depth = waiting.pop()
        found.append(Leaf(snapshot=one, depth=depth))
        children = below.pop((one.store, one.id), []) if one.id else []
        # A chain without branches keeps its depth; only branches are indented.
        waiting += [(child, depth + (len(children) > 1)) for child in reversed(children)]
    return found


def snapshot_columns(clock_: Callable[[], float]) -> Sequence[Column[Leaf]]:
    """Return the columns of the tree of snapshots. `clock_`: returns the time now."""

    def name(leaf: Leaf) -> Cell:
        one = leaf.snapshot
        mark = "└ " if leaf.depth else ""
        pin = " ⚲pinned" if one.pinned else ""
        return f"{'  ' * min(leaf.depth, 6)}{mark}{one.name or one.id or '–'}{pin}", ""

    def state(leaf: Leaf) -> Cell:
        one = leaf.snapshot
        if one.wrong is not None:
            return f"✗ {one.wrong}", "bad"
        at = one.verified_at
        told = one.verified if at is None else f"{one.verified} {ago(at, clock_())} ago"
        if one.damaged:
            return f"✗ {told}", "bad"
        return (told, "dim") if at is None else (f"✓ {told}", "good")

    def made(leaf: Leaf) -> Cell:
        at = leaf.snapshot.made_at
        return (wording.clock(at, clock_()), "") if at else ("–", "dim")

    return (
        Column(label="guest", width=10, grows=1, cell=lambda one: (one.snapshot.guest, "")),
        Column(label="snapshot", width=16, grows=3, cell=name),
        Column(label="made", width=12, cell=made),
        Column(label="new", width=8, right=True,
               cell=lambda one: (show_bytes(one.snapshot.new), "")),
        Column(label="memory", width=8, right=True, from_width=100,
               cell=lambda one: (show_bytes(one.snapshot.memory), "")),
        Column(label="disks", width=8, right=True, from_width=100,
               cell=lambda one: (show_bytes(one.snapshot.disks), "")),
        Column(label="schedule", width=9, from_width=120,
               cell=lambda one: (one.snapshot.schedule or "by hand", "dim")),
        Column(label="verified", width=14, grows=2, cell=state),
        Column(label="store", width=8, from_width=90, cell=lambda one: (one.snapshot.store, "dim")),
    )  # fmt: skip


_SEVERITIES: Mapping[str, Cell] = {
    Severity.OK: ("✓ ok", "good"),
    Severity.INFO: ("· info", "dim"),
    Severity.WARNING: ("! warning", "warn"),
    Severity.BLOCKER: ("✗ blocker", "bad"),
}


def finding_columns() -> Sequence[Column[Finding]]:
    """Return the columns of the list of findings."""
    return (
        Column(label="", width=9, cell=lambda one: _SEVERITIES[one.severity],
               order=lambda one: -list(_SEVERITIES).index(one.severity)),
        Column(label="where", width=10, grows=1, cell=lambda one: (one.where, ""),
               order=lambda one: one.where),
        Column(label="finding", width=20, grows=4, cell=lambda one: (one.text, "")),
        Column(label="hint", width=16, grows=3, from_width=100,
               cell=lambda one: (one.hint or "", "dim")),
    )  # fmt: skip


UNDECIDED = "(two policies are equally specific)"
"""Stands for the policy of a guest that two policies match equally well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A policy, and the number of guests that it applies to."""

    policy: Policy
    guests: int | None
    """Number of guests; None while they are being counted."""


def chosen(policies: Sequence[Policy], guest: GuestNow, hosts: Mapping[str, HostNow]) -> str:
    """Return the name of the policy that applies to a guest, or `UNDECIDED`."""
    host = hosts.get(guest.host)
    subject = Subject(
        guest=guest.name, guest_labels=guest.labels, memory=guest.memory,
        host_labels={} if host is None else host.labels,
    )  # fmt: skip
    try:
        return select.choose(policies, subject).policy.name
    except PolicyError:
        return UNDECIDED


def policy_columns() -> Sequence[Column[Use]]:
    """Return the columns of the list of policies."""
    return (
        Column(label="policy", width=16, cell=lambda one: (one.policy.name, ""),
               order=lambda one: one.policy.name),
        Column(label="guests", width=6, right=True, order=lambda one: one.guests or 0,
               cell=lambda one: ("…", "dim") if one.guests is None
               else (f"{one.guests:,}", "" if one.guests else "dim")),
        Column(label="mode", width=10, cell=lambda one: (str(one.policy.mode), "")),
        Column(label="downtime", width=8, right=True,
               cell=lambda one: (show_seconds(one.policy.limits.max_downtime), "")),
        Column(label="post-copy", width=9,
               cell=lambda one: ("yes" if one.policy.may_switch_early else "no", "")),
        Column(label="file", width=10, grows=1, from_width=120,
               cell=lambda one: ("shipped" if one.policy.shipped else str(one.policy.file), "dim")),
        Column(label="purpose", width=16, grows=3, cell=lambda one: (one.policy.description, "")),
    )  # fmt: skip
