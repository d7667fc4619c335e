"""What a migration command is given, and the policy with the operator's overrides applied. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vmckpt.migration.run.decide import RunTerms, time_limit
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.model.migration import AutoConverge, Compression, Driver, Mode, MoveOrder, OutsideView
from vmckpt.policy.model import Compress, CopyKind, LeftBehind, MoveLimits, Policy, Throttle, Tls
from vmckpt.units import Bytes, BytesPerSecond, Seconds

# A job must be started for what a rule may switch on later. Until then it shall do next to nothing.
IDLE_THROTTLE = AutoConverge(initial=1, increment=1, at_most=1)
_ANSWERED = Seconds(600.0)
"""So long it is tried, as by the default policy."""
_IDLE_CACHE = Bytes(64 * 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOverrides:
    """What the operator said on the command line; None: as the policy has it."""

    mode: Mode | None = None
    bandwidth: BytesPerSecond | None = None
    max_downtime: Seconds | None = None
    timeout: Seconds | None = None
    tls: Tls | None = None
    copy: CopyKind | None = None

    def as_json(self) -> dict[str, Any]:
        """For the journal: whoever goes on with a migration holds it to the same."""
        return asdict(self)

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> "PolicyOverrides":
        """The wishes again. Raises ValueError if they are none."""
        return TypeAdapter(PolicyOverrides).validate_python(stored)


def apply_overrides(policy: Policy, overrides: PolicyOverrides) -> Policy:
    """The policy with the operator's wishes in it."""
    limits = policy.limits
    if overrides.timeout is not None:
        limits = replace(limits, time=overrides.timeout, time_per_gib=None)
    limits = replace(
        limits,
        bandwidth=overrides.bandwidth or limits.bandwidth,
        postcopy_bandwidth=overrides.bandwidth or limits.postcopy_bandwidth,
        max_downtime=overrides.max_downtime or limits.max_downtime,
    )
    transport = replace(policy.transport, tls=overrides.tls or policy.transport.tls)
    mode = overrides.mode or policy.mode
    storage = replace(policy.storage, copy=overrides.copy or policy.storage.copy)
    if mode is Mode.CHECKPOINT:  # whose images are a protection's: it does not remove them
        storage = replace(storage, left_behind=LeftBehind.KEEP)
    return replace(policy, limits=limits, transport=transport, storage=storage, mode=mode)


def plain_choice(policy: Policy, *, post_copy: bool) -> Mode:
    """The mode without a forecast: `auto` keeps the way out into post-copy where there is one."""
    if policy.mode is Mode.AUTO:
        return Mode.HYBRID if post_copy and policy.may_switch_early else Mode.PRECOPY
    if policy.mode is Mode.HYBRID and not post_copy:
        return Mode.PRECOPY
    return policy.mode


def terms(policy: Policy, mode: Mode, guest: Guest, copied: Bytes = Bytes(0)) -> RunTerms:
    """What the controller holds the migration to. `copied`: bytes of disks that go along."""
    return RunTerms(
        policy=policy,
        mode=mode,
        memory=guest.memory,
        post_copy=mode.may_switch_early,
        time_limit=time_limit(policy, Bytes(guest.memory + copied)),
        max_downtime=policy.limits.max_downtime,
    )


def order(
    policy: Policy,
    mode: Mode,
    guest: Guest,
    *,
    driver: Driver,
    storage_proven: bool,
    tls_name: str | None,
) -> MoveOrder:
    """The order that starts it."""
    limits: MoveLimits = policy.limits
    later_throttle = any(isinstance(rule.do, Throttle) for rule in policy.rules)
    later_cache = any(isinstance(rule.do, Compress) for rule in policy.rules)
    how = policy.transport
    live = mode is not Mode.STOP_AND_COPY
    idle_cache = later_cache and live and how.compression is not Compression.XBZRLE
    return MoveOrder(
        driver=driver,
        persistent=guest.persistent,
        autostart=guest.autostart,
        storage_proven=storage_proven,
        bandwidth=limits.bandwidth,
        postcopy_bandwidth=limits.postcopy_bandwidth,
        live=live,
        post_copy=mode.may_switch_early,
        auto_converge=IDLE_THROTTLE if later_throttle and live else None,
        tls_name=tls_name,
        connections=how.connections,
        zero_copy=how.zero_copy,
        compression=Compression.XBZRLE if idle_cache else how.compression,
        compression_level=how.compression_level,
        xbzrle_cache=_IDLE_CACHE if idle_cache else None,
    )


def answered(policy: Policy) -> Policy:
    """Of one that asks as soon as a post-copy breaks: whoever wants it resumed has answered."""
    return policy if policy.recover_for else replace(policy, recover_for=_ANSWERED)


def resumed(policy: Policy) -> RunTerms:
    """What a post-copy that is resumed is held to: there is nothing left to decide but patience."""
    return RunTerms(
        policy=policy,
        mode=Mode.POSTCOPY,
        memory=Bytes(0),
        post_copy=True,
        time_limit=None,
        max_downtime=policy.limits.max_downtime,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateRequest:
    """What the operator asked for."""

    guest: str
    to: str
    from_: str | None = None
    """None: the host on which the guest is found."""
    policy: str | None = None
    """By name or file; None: the one that its `select` chooses."""
    overrides: PolicyOverrides = field(default_factory=PolicyOverrides)
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
