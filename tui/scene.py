"""What an action is about: what is selected, and what is known. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from vmckpt.journal.jobs import JobView
from vmckpt.journal.records import WHOLE_HOST
from vmckpt.model.guest import (
    Copies,
    FleetNow,
    GuestNow,
    HostNow,
    SnapshotNow,
    merged,
)
from vmckpt.protection.copies import of_protections

_PLAIN = re.compile(r"[A-Za-z0-9_][\w.@+-]*", re.ASCII)
_MIGRATE = "migrate"


class Where(StrEnum):
    """The part of the dashboard that somebody is in."""

    FLEET = "fleet"
    JOBS = "jobs"
    MOVE = "move"
    """One migration."""
    DRAIN = "drain"
    """One job of a whole host."""
    GUARD = "guard"
    """Protections, and one of them."""
    SNAPSHOTS = "snapshots"
    POLICIES = "policies"
    DOCTOR = "doctor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """All that is known, as it came last."""

    fleet: FleetNow = field(default_factory=lambda: FleetNow(at=0.0))
    jobs: Sequence[JobView] = ()
    """Active ones first."""
    protections: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """By job; see api.protecting.stands."""
    snapshots: Sequence[SnapshotNow] = ()
    policies: Sequence[str] = ()
    """Their names."""
    trouble: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """What cannot be asked, and why."""
    read_only: bool = False

    @property
    def active(self) -> Sequence[JobView]:
        return [one for one in self.jobs if one.operation.active]

    @property
    def copies(self) -> Sequence[Copies]:
        """Guests that have two copies."""
        return merged(self.fleet.copies, of_protections(self.protections.values()))

    def host(self, name: str | None) -> HostNow | None:
        return next((one for one in self.fleet.hosts if one.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is selected now."""

    where: Where
    model: Model
    guests: tuple[GuestNow, ...] = ()
    """The marked ones, else the one under the cursor."""
    host: HostNow | None = None
    job: JobView | None = None
    done: float | None = None
    """Of that job, as seen last; 0 to 1."""
    remaining: int | None = None
    """Bytes that it has still to send."""
    entry: Mapping[str, Any] | None = None
    """A protection."""
    snapshots: tuple[SnapshotNow, ...] = ()
    policy: str | None = None

    @property
    def guest(self) -> GuestNow | None:
        return self.guests[0] if self.guests else None

    def open_hosts(self) -> Sequence[HostNow]:
        """Hosts that may take what is selected, the one with most free memory first."""
        here = {one.host for one in self.guests}
        found = [
            one for one in self.model.fleet.hosts
            if one.error is None and one.closed is None and one.name not in here
        ]  # fmt: skip
        return sorted(found, key=lambda one: (-one.free, one.name))

    def called(self, guest: GuestNow) -> str:
        """What a command is to call it: its name, if that is one and no other guest has it."""
        same = {one.uuid for one in self.model.fleet.guests if one.name == guest.name}
        return guest.name if _PLAIN.fullmatch(guest.name) and len(same) == 1 else guest.uuid

    def busy(self, guest: GuestNow) -> JobView | None:
        """The job that has it in hand; protections are none."""
        return next(
            (
                one for one in self.model.active
                if one.operation.guest_uuid == guest.uuid and one.operation.kind != "protect"
            ),
            None,
        )  # fmt: skip

    def protected(self, guest: GuestNow) -> JobView | None:
        return next(
            (
                one for one in self.model.active
                if one.operation.kind == "protect" and one.operation.guest_uuid == guest.uuid
            ),
            None,
        )  # fmt: skip


def is_move(view: JobView | None) -> bool:
    """Whether it is a migration of one guest."""
    return view is not None and view.operation.kind == _MIGRATE


def is_whole(view: JobView | None) -> bool:
    """Whether it is about a host and all its guests."""
    return view is not None and view.operation.kind in WHOLE_HOST
