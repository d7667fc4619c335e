"""Explain a policy key by key: the value, where it comes from, and what it is for. Pure."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, assert_never

from vmckpt.policy.model import (
    Auto,
    Compress,
    Do,
    GiveUp,
    Keep,
    Pause,
    Policy,
    RaiseDowntime,
    Rule,
    RuleCondition,
    Schedule,
    Select,
    StartPostcopy,
    SwitchCost,
    Throttle,
    period,
)
from vmckpt.policy.schema import sentence
from vmckpt.policy.select import Chosen
from vmckpt.units import show_bytes, show_rate, show_seconds


def condition_text(condition: RuleCondition) -> str:
    """Describe when a rule acts: "stalled for 10 s and more than 64 MiB left", or "always"."""
    said = (
        _said("in pass {} or later", condition.iteration),
        _said("stalled for {}", condition.stalled_for, show_seconds),
        _said("{} or more of the last pass dirty again", condition.dirty_over_bandwidth, _per_cent),
        _said(
            "pre-copy would resend {} of the first pass or more", condition.precopy_excess,
            _per_cent,
        ),
        _said(
            "post-copy now has the lowest cost ({})", condition.lowest_cost, _weights
        ),
        _said("expected downtime above {}", condition.expected_downtime_above, show_seconds),
        _said("expected downtime below {}", condition.expected_downtime_below, show_seconds),
        _said("{} used", condition.time_used, show_seconds),
        _said("{} of the time limit used", condition.time_share, _per_cent),
        _said("more than {} left", condition.remaining_above, show_bytes),
        _said("less than {} left", condition.remaining_below, show_bytes),
    )  # fmt: skip
    return " and ".join(one for one in said if one) or "always"


def action_text(action: Do) -> str:
    """Describe what a rule does: "raise the allowed downtime by 50 ms per pass, up to 500 ms"."""
    match action:
        case RaiseDowntime():
            by, to = show_seconds(action.by), show_seconds(action.to)
            return f"raise the allowed downtime by {by} per pass, up to {to}"
        case Throttle():
            how = action.how
            return (
                f"slow the guest down by {how.initial} % of its CPU time,"
                f" then by {how.increment} % more each time, up to {how.at_most} %"
            )
        case Compress():
            return f"send differences only (xbzrle, cache of {show_bytes(action.cache)})"
        case StartPostcopy():
            return "switch to post-copy, if the guest and both hosts support it"
        case Pause():
            return "pause the guest until it runs on the target"
        case GiveUp():
            return "cancel the migration; the guest stays where it is"
        case _:
            assert_never(action)


def schedule_text(one: Schedule) -> str:
    """Describe a schedule: "daily 03:00, memory and disks, into near (keeps 7 last)"."""
    what = "memory and disks" if one.memory else "disks only"
    what += " of all guests at one instant" if one.group else ""
    said = [f"{one.text}, {what}, into {one.store or 'the first store'}{_kept(one.keep)}"]
    said += [f"copied to {copy.store}{_kept(copy.keep)}" for copy in one.copies]
    if one.verify is not None:
        said.append(f"verified every {period(one.verify.every)} ({one.verify.depth})")
    if isinstance(one.when, Auto):
        said.append(f"assuming one failure in {period(one.when.one_failure_in)}")
    return "; ".join(said)


def _kept(keep: Keep) -> str:
    return "" if keep.nothing_said else f" (keeps {keep})"


def _said(form: str, value: float | SwitchCost | None, show: object = str) -> str:
    if value is None:
        return ""
    return form.format(show(value) if callable(show) else value)


def _weights(cost: SwitchCost) -> str:
    return (
        f"total time × {cost.total_time:g} + post-copy × {cost.postcopy_time:g}"
        f" + lost work × {cost.lost_work:g}"
    )


def _per_cent(share: float) -> str:
    return f"{share * 100:g} %"


DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A key of a policy with its value and meaning."""

    key: str
    """The key as in the file: "limits.max_downtime", "converge.rules.0"."""
    value: str
    """The value for display, such as "300 ms"."""
    where: str
    """The line that sets the key, such as "web.yaml:12", or "default"."""
    meaning: str


def values(policy: Policy) -> tuple[Explained, ...]:
    """Return an explanation of every key, in the order of the schema.

    Each rule and each schedule counts as a key.
    """
    given = dict(policy.given)

    def where(key: str) -> str:
        return f"{policy.file}:{given[key]}" if key in given else DEFAULT

    return tuple(
        Explained(key=key, value=value, where=where(key), meaning=meaning)
        for key, value, meaning in _rows(policy)
    )


def choice(chosen: Chosen) -> tuple[str, ...]:
    """Return why a policy was chosen, with a line for each policy that was passed over."""
    return (
        f"{chosen.policy.name}, because {' and '.join(chosen.why)}",
        *(f"not {one.policy.name}: {one.why}" for one in chosen.passed_over),
    )


def as_json(policy: Policy) -> dict[str, Any]:
    """Return a policy as JSON: times in seconds, sizes in bytes, rates in bytes per second."""
    return {
        field.name: _plain(getattr(policy, field.name))
        for field in fields(policy)
        if field.name != "given"
    }


def limit(policy: Policy) -> str:
    """Describe the time limit in a few words; "none" if there is no limit."""
    limits = policy.limits
    said = [] if limits.time is None else [show_seconds(limits.time)]
    if limits.time_per_gib is not None:
        said.append(f"{show_seconds(limits.time_per_gib)}/GiB")
    return ", ".join(said) or "none"


Row = tuple[str, Callable[[Policy], str]]


def _or(show: Callable[[Any], str], nothing: str) -> Callable[[Any], str]:
    return lambda value: nothing if value is None else show(value)


_rate, _limit = _or(show_rate, "unlimited"), _or(show_seconds, "unlimited")

_BEFORE_RULES: tuple[Row, ...] = (
    ("name", lambda p: p.name),
    ("description", lambda p: p.description or "none"),
    ("select", lambda p: _who(p.select)),
    ("mode", lambda p: str(p.mode)),
    ("limits.max_downtime", lambda p: show_seconds(p.limits.max_downtime)),
    ("limits.bandwidth", lambda p: _rate(p.limits.bandwidth)),
    ("limits.postcopy_bandwidth", lambda p: _rate(p.limits.postcopy_bandwidth)),
    ("limits.time", lambda p: _limit(p.limits.time)),
    ("limits.time_per_gib", lambda p: _limit(p.limits.time_per_gib)),
    ("retries.times", lambda p: str(p.retries.times)),
    ("retries.first_wait", lambda p: show_seconds(p.retries.first_wait)),
    ("retries.factor", lambda p: f"{p.retries.factor:g}"),
    ("retries.longest_wait", lambda p: show_seconds(p.retries.longest_wait)),
    ("converge.stall.window", lambda p: show_seconds(p.stall.window)),
    ("converge.stall.margin", lambda p: f"{p.stall.margin * 100:g} %"),
    ("converge.stall.smoothing", lambda p: f"{p.stall.smoothing * 100:g} %"),
    ("converge.stall.patience", lambda p: show_seconds(p.stall.patience)),
)
_AFTER_RULES: tuple[Row, ...] = (
    ("transport.tls", lambda p: str(p.transport.tls)),
    ("transport.connections", lambda p: str(p.transport.connections)),
    ("transport.zero_copy", lambda p: "yes" if p.transport.zero_copy else "no"),
    ("transport.compression", lambda p: str(p.transport.compression)),
    (
        "transport.compression_level",
        lambda p: _or(str, "QEMU's default")(p.transport.compression_level),
    ),
    ("storage.copy", lambda p: str(p.storage.copy)),
    ("storage.disks", lambda p: ", ".join(p.storage.disks) or "all disks that are not shared"),
    ("storage.pool", lambda p: p.storage.pool or "the same path"),
    ("storage.left_behind", lambda p: str(p.storage.left_behind)),
    ("on_failure", lambda p: str(p.on_failure)),
    (
        "on_postcopy_broken",
        lambda p: (
            f"recover for {show_seconds(p.recover_for)}, then ask" if p.recover_for else "ask"
        ),
    ),
    ("forecast.probe", lambda p: show_seconds(p.probe) if p.probe else "off"),
    ("protect.interval", lambda p: _or(show_seconds, "auto")(p.protection.interval)),
    ("protect.slowdown", lambda p: f"{p.protection.slowdown * 100:g} %"),
    ("protect.max_pause", lambda p: show_seconds(p.protection.max_pause)),
    ("protect.hold", lambda p: show_seconds(p.protection.hold)),
    ("protect.failover", lambda p: str(p.protection.failover)),
    ("protect.lease", lambda p: show_seconds(p.protection.lease)),
    ("evacuate.strategy", lambda p: str(p.evacuation.strategy)),
    ("evacuate.move_shut_off", lambda p: "yes" if p.evacuation.move_shut_off else "no"),
    ("evacuate.priority", lambda p: str(p.evacuation.priority)),
    ("evacuate.apart", lambda p: ", ".join(p.evacuation.apart) or "none"),
    ("evacuate.needs", lambda p: _labels(p.evacuation.needs)),
    ("evacuate.prefers", lambda p: _labels(p.evacuation.prefers)),
    ("evacuate.shutdown", lambda p: show_seconds(p.evacuation.shutdown)),
    ("evacuate.order", lambda p: str(p.evacuation.order)),
    ("evacuate.at_once.source", lambda p: str(p.evacuation.per_source)),
    ("evacuate.at_once.target", lambda p: str(p.evacuation.per_target)),
    ("evacuate.at_once.total", lambda p: str(p.evacuation.at_once)),
    ("evacuate.keep_free", lambda p: f"{p.evacuation.keep_free * 100:g} %"),
    ("evacuate.cpu_overcommit", lambda p: f"{p.evacuation.cpu_overcommit:g}"),
    ("evacuate.weights.spread", lambda p: f"{p.evacuation.spread:g}"),
    ("evacuate.weights.prefer", lambda p: f"{p.evacuation.prefer:g}"),
    ("evacuate.weights.stay_near", lambda p: f"{p.evacuation.stay_near:g}"),
    ("evacuate.displace", lambda p: "yes" if p.evacuation.displace else "no"),
    ("evacuate.tries", lambda p: str(p.evacuation.tries)),
    ("evacuate.first_wait", lambda p: show_seconds(p.evacuation.first_wait)),
)


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels) or "none"


def _rows(policy: Policy) -> Iterator[tuple[str, str, str]]:
    for key, show in _BEFORE_RULES:
        yield key, show(policy), sentence(key)
    if not policy.rules:
        yield "converge.rules", "none", sentence("converge.rules")
    for number, rule in enumerate(policy.rules):
        yield (
            f"converge.rules.{number}",
            action_text(rule.do),
            f"{rule.name}: {condition_text(rule.when)}",
        )
    for key, show in _AFTER_RULES:
        yield key, show(policy), sentence(key)
    if not policy.snapshots:
        yield "snapshots", "none", sentence("snapshots")
    for number, schedule in enumerate(policy.snapshots):
        yield f"snapshots.{number}", schedule_text(schedule), f"schedule {schedule.name}"


def _who(select: Select) -> str:
    """Describe which guests a policy applies to."""
    if select.by_name_only:
        return "only if requested by name"
    said = [f"guests {' or '.join(select.guests)}"] if select.guests else []
    said += [f"guest label {key}={value}" for key, value in select.guest_labels]
    said += [f"host label {key}={value}" for key, value in select.host_labels]
    if select.at_least is not None:
        said.append(f"memory of {show_bytes(select.at_least)} or more")
    if select.below is not None:
        said.append(f"memory below {show_bytes(select.below)}")
    return " and ".join(said) or "all guests"


_ACTIONS: Mapping[str, str] = {
    "RaiseDowntime": "raise_downtime",
    "Throttle": "auto_converge",
    "Compress": "compress",
    "StartPostcopy": "start_postcopy",
    "Pause": "pause",
    "GiveUp": "abort",
}


def _plain(value: Any) -> Any:
    """Convert frozen data to dictionaries, lists and plain values, without None in `when`."""
    if isinstance(value, Rule):
        when = {key: one for key, one in _plain(value.when).items() if one is not None}
        action = _ACTIONS[type(value.do).__name__]
        return {"name": value.name, "when": when, "do": {action: _plain(value.do)}}
    if isinstance(value, Schedule):
        names = [one.name for one in fields(value) if one.name not in ("text", "when")]
        return {"when": value.text} | {name: _plain(getattr(value, name)) for name in names}
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value
