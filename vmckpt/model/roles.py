"""The roles of operators: which role each command needs, and which user has which role. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Role(StrEnum):
    """What a user may do. Each role includes the roles before it."""

    VIEW = "view"
    """Commands that change nothing."""
    MOVE = "move"
    """Commands that lose neither the state of a guest nor a snapshot. An evacuation shuts down or
    suspends guests whose policies say so."""
    DESTROY = "destroy"
    """Commands that can lose the state of a guest or a snapshot, or run programs as root."""


_ORDER = (Role.VIEW, Role.MOVE, Role.DESTROY)

NEEDS: Mapping[str, Role] = MappingProxyType({
    "audit list": Role.VIEW,
    "audit verify": Role.VIEW,
    "balance": Role.MOVE,
    "cancel": Role.MOVE,
    "dashboard": Role.VIEW,
    "doctor": Role.VIEW,
    "evacuate": Role.MOVE,
    "events": Role.VIEW,
    "failover": Role.DESTROY,
    "failover --end-test": Role.MOVE,
    "failover --planned": Role.MOVE,
    "failover --test": Role.MOVE,
    "fork create": Role.MOVE,
    "fork drop": Role.DESTROY,
    "fork keep": Role.MOVE,
    "fork tree": Role.VIEW,
    "guard": Role.DESTROY,  # restores the guest if the command fails
    "guests": Role.VIEW,
    "hosts": Role.VIEW,
    "job": Role.VIEW,
    "jobs": Role.VIEW,
    "label": Role.MOVE,
    "maintenance enter": Role.MOVE,
    "maintenance leave": Role.MOVE,
    "maintenance list": Role.VIEW,
    "manual": Role.VIEW,
    "migrate": Role.MOVE,
    "notify": Role.VIEW,
    "pause": Role.MOVE,
    "plan": Role.VIEW,
    "policy check": Role.VIEW,
    "policy explain": Role.VIEW,
    "policy list": Role.VIEW,
    "policy replay": Role.VIEW,
    "policy schema": Role.VIEW,
    "policy show": Role.VIEW,
    "postcopy": Role.MOVE,
    "prepare": Role.MOVE,
    "protect": Role.MOVE,
    "recover": Role.DESTROY,  # can destroy a copy of a guest
    "repopulate": Role.MOVE,
    "resume": Role.MOVE,
    "roll": Role.DESTROY,  # runs any command on hosts
    "run": Role.DESTROY,  # prunes snapshots, fences hosts, fails guests over
    "schema": Role.VIEW,
    "set": Role.MOVE,
    "snapshot copy": Role.MOVE,
    "snapshot create": Role.MOVE,
    "snapshot delete": Role.DESTROY,
    "snapshot diff": Role.VIEW,
    "snapshot export": Role.MOVE,  # hands out the memory and disks of a guest
    "snapshot gc": Role.DESTROY,
    "snapshot import": Role.MOVE,
    "snapshot init": Role.MOVE,
    "snapshot keys add": Role.DESTROY,  # determines which keys open snapshots
    "snapshot keys distrust": Role.DESTROY,
    "snapshot keys export-salt": Role.DESTROY,
    "snapshot keys import-salt": Role.DESTROY,
    "snapshot keys list": Role.VIEW,
    "snapshot keys new": Role.DESTROY,
    "snapshot keys remove": Role.DESTROY,
    "snapshot keys rotate": Role.DESTROY,
    "snapshot keys trust": Role.DESTROY,
    "snapshot list": Role.VIEW,
    "snapshot open": Role.MOVE,  # hands out the memory and disks of a guest
    "snapshot pin": Role.MOVE,
    "snapshot prune": Role.DESTROY,
    "snapshot restore": Role.DESTROY,  # replaces the guest's memory and disks
    "snapshot restore --as": Role.MOVE,
    "snapshot show": Role.VIEW,
    "snapshot unpin": Role.DESTROY,  # the service may then prune the snapshot
    "snapshot verify": Role.VIEW,
    "snapshot verify --boot": Role.MOVE,
    "snapshot verify --repair": Role.MOVE,
    "status": Role.VIEW,
    "unprotect": Role.MOVE,
    "unprotect --lost-journal": Role.DESTROY,
    "watch": Role.VIEW,
})  # fmt: skip
"""The role that each command needs; an option that needs another role has its own row."""

NO_JOB = frozenset(
    name
    for name, role in NEEDS.items()
    if role is not Role.VIEW
    and name.startswith(("snapshot ", "fork "))
    and not name.startswith((
        "snapshot create", "snapshot restore", "snapshot verify --boot", "fork create"
    ))
)  # fmt: skip
"""Commands that are no jobs, such as those that act on stores and keys: the audit trail records
their start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActingUser:
    """The user on whose behalf this process acts."""

    name: str
    groups: frozenset[str]
    root: bool = False
    """Whether root acts itself, and not a user that became root with sudo or su."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The users with a role, and the groups whose members have it."""

    users: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()

    def include(self, user: ActingUser) -> bool:
        """Return whether a user is named, or is in one of the groups."""
        return user.name in self.users or not self.groups.isdisjoint(user.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The roles in an inventory."""

    members: Mapping[Role, Members]

    def of(self, user: ActingUser) -> Role | None:
        """Return a user's highest role; None: the user has no role. Root has every role."""
        if user.root:
            return _ORDER[-1]
        held = [one for one in _ORDER if one in self.members and self.members[one].include(user)]
        return held[-1] if held else None

    def lacks(self, user: ActingUser, needed: Role) -> bool:
        """Return whether a user has neither the needed role nor a higher one."""
        held = self.of(user)
        return held is None or _ORDER.index(held) < _ORDER.index(needed)
