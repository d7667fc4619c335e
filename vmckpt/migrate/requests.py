"""What a migration command is given: the order, the place, and whoever gave it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vmckpt.migrate.terms import Wishes
from vmckpt.model.host import Host
from vmckpt.model.migration import OutsideView
from vmckpt.policy.model import Policy
from vmckpt.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateRequest:
    """What the operator asked for."""

    guest: str
    to: str
    from_: str | None = None
    """None: the host on which the guest is found."""
    policy: str | None = None
    """By name or file; None: the one that its `select` chooses."""
    wishes: Wishes = field(default_factory=Wishes)
    dry_run: bool = False
    observe: bool = False
    """Decide and tell, and do nothing about it."""
    trace: Path | None = None
    """Write samples and decisions there."""
    closed_too: bool = False
    """Only to look ahead: also to a host that is in maintenance, and will not be by then."""
    part_of: str | None = None
    """The job that it is a part of."""
    probe: Seconds | None = None
    """How long the guest is measured before; None: as the policy has it, 0: not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where a migration takes place."""

    source: Host
    target: Host
    policies: Sequence[Policy]
    outside: OutsideView | None
    """Somebody who watches guests from outside; None: nobody does."""
    others: Sequence[Host] = ()
    """Hosts that the guest may have been moved on to by hand."""
