"""What can be done from the dashboard, and what an action is about. Pure.

Each action is a command that people could type; the dashboard shows it before it runs it. Help, the
footer, the command palette and the dialogs are all made from this table.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from vmckpt.journal.jobs import JobView
from vmckpt.journal.records import WHOLE_HOST
from vmckpt.model.guest import Copies, FleetNow, GuestNow, HostNow, SnapshotNow, merged
from vmckpt.protection.copies import of_protections
from vmckpt_tui.wording import host_in_words

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
    PROTECTION = "guard"
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
    """By job; see app.protection.job_status."""
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


Words = tuple[str, ...]
"""A command, without "vmckpt"."""
Answers = Mapping[str, str]
"""What was filled in, by the field's name; what was left out is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Something to be filled in."""

    name: str
    label: str
    choices: tuple[tuple[str, str], ...] | None = None
    """What is shown and what it means; None: free text."""
    value: str = ""
    """To begin with."""
    needed: bool = True
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing to do."""

    name: str
    key: str
    label: str
    """In the footer."""
    help: str
    where: tuple[Where, ...]
    fits: Callable[[Scene], str | None]
    """Why it cannot be done now; None: it can."""
    run: Callable[[Scene, Answers], tuple[Words, ...]] | None = None
    """What is done: commands one after the other. None: it only looks."""
    look: Callable[[Scene, Answers], Words | None] = lambda _scene, _answers: None
    """What shows beforehand what would come of it."""
    fields: Callable[[Scene], tuple[Field, ...]] = lambda _scene: ()
    costs: Callable[[Scene, Answers], str | None] = lambda _scene, _answers: None
    """What is lost or at stake, in numbers. Then it is asked, and the answer is no by itself."""
    shown: bool = True
    """Whether it has a place in the footer."""
    of_host: bool = False
    """It is about a host and not about guests."""
    of_store: bool = False
    """It is about a store and not about single snapshots."""
    local: bool = False
    """The dashboard does it itself; there is no command."""


def missing(action: Action, scene: Scene, answers: Answers) -> str | None:
    """What is still to be filled in."""
    for one in action.fields(scene):
        if one.needed and not answers.get(one.name):
            return f"{one.label}?"
    return None


def why_not(action: Action, scene: Scene) -> str | None:
    """Why an action cannot be done now; None: it can."""
    if scene.where not in action.where:
        return "not here"
    if action.run is not None and scene.model.read_only:
        return "only looking is allowed"
    return action.fits(scene)


def about(action: Action, scene: Scene) -> str:
    """What it would be done to, in a few words."""
    if action.of_host:
        return "" if scene.host is None else scene.host.name
    if action.of_store and scene.snapshots:
        return f"in {scene.snapshots[0].store}"
    if scene.job is not None:
        return f"{scene.job.operation.id} {scene.job.operation.guest}"
    if scene.entry is not None:
        return str(scene.entry["guest"])
    names = [one.name for one in scene.guests] or [one.name or one.id for one in scene.snapshots]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}" if names else scene.policy or ""


def of(table: Sequence[Action], where: Where) -> Sequence[Action]:
    """Those of one part."""
    return [one for one in table if where in one.where]


def line(words: Words) -> str:
    """As it is typed."""
    return " ".join(("vmckpt", *(_quoted(word) for word in words)))


def _quoted(word: str) -> str:
    if word and all(one.isalnum() or one in "-_./:=,@+%" for one in word):
        return word
    return "'" + word.replace("'", "'\\''") + "'"


def option(name: str, answers: Answers, key: str) -> Words:
    """An option with what was filled in, or nothing."""
    value = answers.get(key)
    return (name, value) if value else ()


def target(scene: Scene, label: str = "to host") -> Field:
    """To which host; the freest one, unless somebody says otherwise."""
    open_ = scene.open_hosts()
    choices = tuple((host_in_words(one), one.name) for one in open_)
    return Field(name="to", label=label, choices=choices, value=open_[0].name if open_ else "")


def policy(scene: Scene, own: str = "each guest's own") -> Field:
    """By which policy."""
    choices = ((own, ""), *((name, name) for name in scene.model.policies))
    return Field(name="policy", label="policy", choices=choices, needed=False)
