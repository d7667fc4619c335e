"""Find keys of a policy that contradict each other or have no effect. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from vmckpt.model.migration import Compression, Mode
from vmckpt.policy import compatibility
from vmckpt.policy.model import (
    Compress,
    CopyKind,
    GiveUp,
    LeftBehind,
    OnFailure,
    Policy,
    RaiseDowntime,
    Rule,
    RuleCondition,
    StartPostcopy,
)
from vmckpt.units import show_seconds

Keys = tuple[str | int, ...]

_NO_POSTCOPY = (Mode.PRECOPY, Mode.STOP_AND_COPY, Mode.CHECKPOINT)
_QEMUS = (
    "transport.connections", "transport.zero_copy", "transport.compression",
    "transport.compression_level",
)  # fmt: skip
_HIGHEST_LEVEL = {Compression.MT: 9, Compression.ZLIB: 9, Compression.ZSTD: 20}

_AT_LEAST = (
    "iteration", "stalled_for", "dirty_over_bandwidth", "precopy_excess", "time_used", "time_share",
    "expected_downtime_above", "remaining_above",
)  # fmt: skip
_AT_MOST = ("expected_downtime_below", "remaining_below")


@dataclass(frozen=True, slots=True)
class Complaint:
    """A contradiction in a policy, or a setting without effect, and the key that causes it."""

    keys: Keys
    text: str


def complaints(policy: Policy) -> tuple[Complaint, ...]:
    """Return all complaints about a policy, in no particular order."""
    return tuple(complaint for check in _CHECKS for complaint in check(policy))


def _mode(policy: Policy) -> Iterator[Complaint]:
    mode = policy.mode
    given = dict(policy.given)
    if mode is Mode.HYBRID and not policy.may_switch_early:
        yield Complaint(
            ("mode",), "mode hybrid needs a start_postcopy rule; add one, or write mode: precopy"
        )
    elif not policy.may_switch_early:
        for key in ("limits.postcopy_bandwidth", "on_postcopy_broken"):
            if key in given:
                why = f"in mode {mode}" if mode in _NO_POSTCOPY else "without a start_postcopy rule"
                yield Complaint(
                    tuple(key.split(".")), f"{key} has no effect: there is no post-copy {why}"
                )


def _by_epochs(policy: Policy) -> Iterator[Complaint]:
    if policy.mode is not Mode.CHECKPOINT:
        return
    given = dict(policy.given)
    for key in _QEMUS:
        if key in given:
            why = "this mode sends compressed differences over one encrypted connection"
            yield Complaint(tuple(key.split(".")), f"{key} has no effect in mode checkpoint: {why}")
    if policy.storage.left_behind is LeftBehind.REMOVE:
        yield Complaint(
            ("storage", "left_behind"),
            "storage.left_behind: remove is not supported in mode checkpoint; delete the key",
        )


def _rules(policy: Policy) -> Iterator[Complaint]:
    names: set[str] = set()
    for number, rule in enumerate(policy.rules):
        here: Keys = ("converge", "rules", number)
        if rule.name in names:
            yield Complaint((*here, "name"), f"two rules are named {rule.name!r}")
        names.add(rule.name)
        for complaint in (_wrong_in_mode(policy, rule), _does_nothing(policy, rule)):
            if complaint is not None:
                yield Complaint((*here, "do"), complaint)
        for key, complaint in _contradictions(policy, rule.when):
            yield Complaint((*here, "when", key), complaint)


def _wrong_in_mode(policy: Policy, rule: Rule) -> str | None:
    if policy.mode is Mode.CHECKPOINT:
        return "rules apply only to migrations by QEMU, not to mode checkpoint; remove the rules"
    if policy.mode is Mode.STOP_AND_COPY and not isinstance(rule.do, GiveUp):
        return "in mode stop-and-copy, the guest is already paused; only abort has an effect"
    if policy.mode in _NO_POSTCOPY and isinstance(rule.do, StartPostcopy):
        return (
            f"start_postcopy is not possible in mode {policy.mode};"
            " write mode: hybrid, or remove the rule"
        )
    if rule.when.lowest_cost is not None and not isinstance(rule.do, StartPostcopy):
        return "lowest_cost works only with a switch to post-copy; write do: start_postcopy"
    return None


def _does_nothing(policy: Policy, rule: Rule) -> str | None:
    limit = policy.limits.max_downtime
    if isinstance(rule.do, RaiseDowntime) and rule.do.to <= limit:
        return (
            f"raise_downtime to {show_seconds(rule.do.to)} has no effect:"
            f" limits.max_downtime is {show_seconds(limit)}"
        )
    on = policy.transport.compression
    if isinstance(rule.do, Compress) and on is not Compression.NONE:
        return f"compress has no effect: transport.compression is {on} from the start"
    return None


def _contradictions(policy: Policy, when: RuleCondition) -> Iterator[tuple[str, str]]:
    for what in ("expected_downtime", "remaining"):
        above, below = getattr(when, f"{what}_above"), getattr(when, f"{what}_below")
        if above is not None and below is not None and above >= below:
            yield f"{what}_above", f"{what}_above must be less than {what}_below"
    limits = policy.limits
    if when.time_share is not None and limits.time is None and limits.time_per_gib is None:
        yield (
            "time_used",
            "time_used is a share of the time limit, but no time limit is set;"
            " set limits.time or limits.time_per_gib, or give time_used as a time, like 5m",
        )
    if when.time_used is not None and limits.time is not None and when.time_used >= limits.time:
        yield "time_used", "time_used must be less than limits.time, which cancels the migration"


def _never_acts(policy: Policy) -> Iterator[Complaint]:
    """Yield a complaint about each rule that never acts because an earlier rule always aborts."""
    for number, rule in enumerate(policy.rules):
        for earlier in policy.rules[:number]:
            if isinstance(earlier.do, GiveUp) and _implies(rule.when, earlier.when):
                yield Complaint(
                    ("converge", "rules", number),
                    f"{rule.name!r} never acts: the earlier rule {earlier.name!r} always aborts"
                    " before it",
                )
                break


def _implies(when: RuleCondition, other: RuleCondition) -> bool:
    """Return whether `other` always holds when `when` does."""
    for keys, sign in ((_AT_LEAST, 1), (_AT_MOST, -1)):
        for key in keys:
            mine, needed = getattr(when, key), getattr(other, key)
            if needed is not None and (mine is None or sign * mine < sign * needed):
                return False
    return other.lowest_cost in (None, when.lowest_cost)


def _limits(policy: Policy) -> Iterator[Complaint]:
    limits = policy.limits
    if limits.time is not None and limits.max_downtime >= limits.time:
        yield Complaint(("limits", "max_downtime"), "max_downtime must be less than limits.time")


def _retries(policy: Policy) -> Iterator[Complaint]:
    retries, given = policy.retries, dict(policy.given)
    if policy.on_failure is OnFailure.STOP and "retries" in given:
        yield Complaint(("retries",), "retries has no effect without on_failure: retry")
    if policy.on_failure is OnFailure.RETRY and retries.times == 0:
        yield Complaint(
            ("on_failure",), "on_failure: retry needs at least one retry; write retries: {times: 2}"
        )
    if retries.longest_wait < retries.first_wait:
        key = "longest_wait" if "retries.longest_wait" in given else "first_wait"
        yield Complaint(
            ("retries", key),
            f"longest_wait {show_seconds(retries.longest_wait)} is less than"
            f" first_wait {show_seconds(retries.first_wait)}",
        )


def _transport(policy: Policy) -> Iterator[Complaint]:
    how = policy.transport
    for one in compatibility.impossible(policy):
        yield Complaint(one.keys, f"{one.text}; {one.hint}")
    if how.compression_level is None:
        return
    key, most = ("transport", "compression_level"), _HIGHEST_LEVEL.get(how.compression)
    if how.compression is Compression.NONE:
        yield Complaint(
            key, "compression_level needs a compression method, such as compression: zstd"
        )
    elif most is None:
        yield Complaint(key, f"{how.compression} has no levels; remove compression_level")
    elif how.compression_level > most:
        yield Complaint(key, f"the highest level of {how.compression} is {most}")


def _storage(policy: Policy) -> Iterator[Complaint]:
    given = dict(policy.given)
    if policy.storage.copy is not CopyKind.SHARED:
        return
    for key in ("disks", "pool", "left_behind"):
        if f"storage.{key}" in given:
            yield Complaint(
                ("storage", key), f"storage.{key} has no effect without copy: full or thin"
            )


def _snapshots(policy: Policy) -> Iterator[Complaint]:
    names: set[str] = set()
    for number, schedule in enumerate(policy.snapshots):
        here: Keys = ("snapshots", number)
        if schedule.name in names:
            yield Complaint((*here, "name"), f"two schedules are named {schedule.name!r}")
        names.add(schedule.name)
        stores = [schedule.store]
        for at, copy in enumerate(schedule.copies):
            if copy.store in stores:
                yield Complaint(
                    (*here, "copies", at, "to"), f"the snapshots are already stored in {copy.store}"
                )
            stores.append(copy.store)


_CHECKS = (
    _mode, _by_epochs, _rules, _never_acts, _limits, _retries, _transport, _storage, _snapshots,
)  # fmt: skip
