"""The request of a migration command, and the policy with its overrides applied. Pure."""

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

# A job must be started with every feature that a rule may need later. Until then, this throttle
# has almost no effect.
IDLE_THROTTLE = AutoConverge(initial=1, increment=1, at_most=1)
_ANSWERED = Seconds(600.0)
"""How long vmckpt tries to resume a broken post-copy; the same as in the default policy."""
_IDLE_CACHE = Bytes(64 * 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOverrides:
    """Options given on the command line. None keeps the policy's value."""

    mode: Mode | None = None
    bandwidth: BytesPerSecond | None = None
    max_downtime: Seconds | None = None
    timeout: Seconds | None = None
    tls: Tls | None = None
    copy: CopyKind | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the overrides for the journal, so that recovery applies them, too."""
        return asdict(self)

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> "PolicyOverrides":
        """Return overrides read from the journal. Raises ValueError if they are invalid."""
        return TypeAdapter(PolicyOverrides).validate_python(stored)


def apply_overrides(policy: Policy, overrides: PolicyOverrides) -> Policy:
    """Return the policy with the operator's overrides applied.

    In mode checkpoint, the source's images are kept, whatever the policy sets.
    """
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
    if mode is Mode.CHECKPOINT:  # its images belong to a protection, which does not remove them
        storage = replace(storage, left_behind=LeftBehind.KEEP)
    return replace(policy, limits=limits, transport=transport, storage=storage, mode=mode)


def plain_choice(policy: Policy, *, post_copy: bool) -> Mode:
    """Return the mode to use without a forecast.

    `post_copy`: whether post-copy is possible. If it is not, `auto` and `hybrid` become `precopy`.
    If it is, `auto` becomes `hybrid`, provided that the policy has a rule with start_postcopy, and
    `precopy` otherwise. Other modes are returned unchanged.
    """
    if policy.mode is Mode.AUTO:
        return Mode.HYBRID if post_copy and policy.may_switch_early else Mode.PRECOPY
    if policy.mode is Mode.HYBRID and not post_copy:
        return Mode.PRECOPY
    return policy.mode


def terms(policy: Policy, mode: Mode, guest: Guest, copied: Bytes = Bytes(0)) -> RunTerms:
    """Return the terms of a migration. `copied`: size of the disks that are copied, in bytes."""
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
    """Return the order that starts the migration. `storage_proven`, `tls_name`: see MoveOrder."""
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
    """Return the policy; if it sets no time to recover a broken post-copy, add a default time.

    A policy without this time asks the operator as soon as a post-copy breaks. A request to resume
    is the operator's answer.
    """
    return policy if policy.recover_for else replace(policy, recover_for=_ANSWERED)


def resumed(policy: Policy) -> RunTerms:
    """Return the terms of a resumed post-copy: only the policy's time to recover still matters."""
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
    """The options of one migration command."""

    guest: str
    to: str
    from_: str | None = None
    """Name of the source; None: the host on which the guest is found."""
    policy: str | None = None
    """Name or file of a policy; None: the policy whose `select` matches the guest."""
    overrides: PolicyOverrides = field(default_factory=PolicyOverrides)
    dry_run: bool = False
    observe: bool = False
    """Report decisions without acting on them."""
    trace: Path | None = None
    """File to which samples and decisions are written."""
    closed_too: bool = False
    """For forecasts only: allow a target whose maintenance will end before the migration."""
    part_of: str | None = None
    """Job ID of the operation that this migration is a part of."""
    probe: Seconds | None = None
    """How long the guest's writes are measured first; None: as in the policy; 0: not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The hosts and policies of a migration."""

    source: Host
    target: Host
    policies: Sequence[Policy]
    outside: OutsideView | None
    """Measures the guest's blackout from outside; None if it is not measured."""
    others: Sequence[Host] = ()
    """Other hosts, to which the guest may have been moved by hand."""
