"""Actions of the dashboard, and the objects that they apply to. Pure.

Each action is a vmckpt command, which the dashboard shows before running it. Help, the footer, the
command palette and the dialogs are all built from the table of actions.
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
    """A part of the dashboard. It decides which actions are available."""

    FLEET = "fleet"
    JOBS = "jobs"
    MOVE = "move"
    """The screen of one migration."""
    DRAIN = "drain"
    """The screen of one job for a whole host."""
    PROTECTION = "guard"
    """The list of protections, and the screen of a single protection."""
    SNAPSHOTS = "snapshots"
    POLICIES = "policies"
    DOCTOR = "doctor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The newest data from all sources."""

    fleet: FleetNow = field(default_factory=lambda: FleetNow(at=0.0))
    jobs: Sequence[JobView] = ()
    """The active jobs, then the latest jobs that have ended."""
    protections: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """The status of each protection, by job ID; see app.protection.job_status."""
    snapshots: Sequence[SnapshotNow] = ()
    policies: Sequence[str] = ()
    """The names of all policies."""
    trouble: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The error of each source that cannot be queried, by the source's name."""
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
    """The current selection."""

    where: Where
    model: Model
    guests: tuple[GuestNow, ...] = ()
    """The marked guests; if none is marked, the guest under the cursor."""
    host: HostNow | None = None
    job: JobView | None = None
    done: float | None = None
    """Progress in the job's last sample, 0 to 1."""
    remaining: int | None = None
    """Number of bytes that the job still has to send."""
    entry: Mapping[str, Any] | None = None
    """The status of the selected protection; see app.protection.job_status."""
    snapshots: tuple[SnapshotNow, ...] = ()
    policy: str | None = None

    @property
    def guest(self) -> GuestNow | None:
        return self.guests[0] if self.guests else None

    def open_hosts(self) -> Sequence[HostNow]:
        """Return possible target hosts for the selected guests, most free memory first."""
        here = {one.host for one in self.guests}
        found = [
            one for one in self.model.fleet.hosts
            if one.error is None and one.closed is None and one.name not in here
        ]  # fmt: skip
        return sorted(found, key=lambda one: (-one.free, one.name))

    def called(self, guest: GuestNow) -> str:
        """Return a guest's name for commands, or its UUID if the name is ambiguous or unusual."""
        same = {one.uuid for one in self.model.fleet.guests if one.name == guest.name}
        return guest.name if _PLAIN.fullmatch(guest.name) and len(same) == 1 else guest.uuid

    def busy(self, guest: GuestNow) -> JobView | None:
        """Return a guest's active job other than its protection; None if it has no such job."""
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
    """Return whether a job is the migration of a single guest."""
    return view is not None and view.operation.kind == _MIGRATE


def is_whole(view: JobView | None) -> bool:
    """Return whether a job is for a host and all its guests."""
    return view is not None and view.operation.kind in WHOLE_HOST


Words = tuple[str, ...]
"""A command, without "vmckpt"."""
Answers = Mapping[str, str]
"""The values of filled fields, by field name. Empty fields are absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of an action's dialog."""

    name: str
    label: str
    choices: tuple[tuple[str, str], ...] | None = None
    """Pairs of label and value to choose from; None: free text."""
    value: str = ""
    """The initial value."""
    needed: bool = True
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An entry in the table of actions."""

    name: str
    key: str
    label: str
    """Text in the footer."""
    help: str
    where: tuple[Where, ...]
    fits: Callable[[Scene], str | None]
    """Returns why the action is not available now; None if it is available."""
    run: Callable[[Scene, Answers], tuple[Words, ...]] | None = None
    """Returns the commands to run one after the other. None: the action changes nothing."""
    look: Callable[[Scene, Answers], Words | None] = lambda _scene, _answers: None
    """Returns the command that previews the result; None: there is no preview."""
    fields: Callable[[Scene], tuple[Field, ...]] = lambda _scene: ()
    costs: Callable[[Scene, Answers], str | None] = lambda _scene, _answers: None
    """Returns what is lost or at risk, in numbers; None: nothing. A cost makes "no" the default."""
    shown: bool = True
    """Whether the footer shows the action."""
    of_host: bool = False
    """Whether the action applies to a host instead of guests."""
    of_store: bool = False
    """Whether the action applies to a store instead of single snapshots."""
    local: bool = False
    """Whether the dashboard performs the action itself, without a command."""


def missing(action: Action, scene: Scene, answers: Answers) -> str | None:
    """Return a prompt for the first required field that is empty; None if all are filled."""
    for one in action.fields(scene):
        if one.needed and not answers.get(one.name):
            return f"{one.label}?"
    return None


def why_not(action: Action, scene: Scene) -> str | None:
    """Return why an action is not available now; None if it is available."""
    if scene.where not in action.where:
        return "not available here"
    if action.run is not None and scene.model.read_only:
        return "the dashboard is read-only"
    return action.fits(scene)


def about(action: Action, scene: Scene) -> str:
    """Return a short description of the objects that an action would apply to."""
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
    """Return the actions of one part of the dashboard."""
    return [one for one in table if where in one.where]


def line(words: Words) -> str:
    """Return a command as a command line, quoted for a shell."""
    return " ".join(("vmckpt", *(_quoted(word) for word in words)))


def _quoted(word: str) -> str:
    if word and all(one.isalnum() or one in "-_./:=,@+%" for one in word):
        return word
    return "'" + word.replace("'", "'\\''") + "'"


def option(name: str, answers: Answers, key: str) -> Words:
    """Return an option with the value of the field `key`; empty if the field is empty."""
    value = answers.get(key)
    return (name, value) if value else ()


def target(scene: Scene, label: str = "to host") -> Field:
    """Return a field for the target host. The default is the host with the most free memory."""
    open_ = scene.open_hosts()
    choices = tuple((host_in_words(one), one.name) for one in open_)
    return Field(name="to", label=label, choices=choices, value=open_[0].name if open_ else "")


def policy(scene: Scene, own: str = "each guest's own") -> Field:
    """Return a field for the policy. `own`: the label of the default."""
    choices = ((own, ""), *((name, name) for name in scene.model.policies))
    return Field(name="policy", label="policy", choices=choices, needed=False)
