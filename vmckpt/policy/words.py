"""Rules in words: for `vmckpt policy explain`, plans and reports. Pure."""

from typing import assert_never

from vmckpt.policy.schedules import Auto, Keep, Schedule, period
from vmckpt.policy.types import (
    Compress,
    Do,
    GiveUp,
    Pause,
    RaiseDowntime,
    StartPostcopy,
    Throttle,
    When,
)
from vmckpt.units import show_bytes, show_seconds


def when(condition: When) -> str:
    """When a rule acts: "stalled for 10 s and more than 64 MiB left"."""
    said = (
        _said("in pass {} or later", condition.iteration),
        _said("stalled for {}", condition.stalled_for, show_seconds),
        _said("{} of what was sent is dirty again", condition.dirty_over_bandwidth, _per_cent),
        _said(
            "pre-copy would send {} of memory more than post-copy", condition.precopy_excess,
            _per_cent,
        ),
        _said("expected downtime above {}", condition.expected_downtime_above, show_seconds),
        _said("expected downtime below {}", condition.expected_downtime_below, show_seconds),
        _said("{} used", condition.time_used, show_seconds),
        _said("{} of the time limit used", condition.time_share, _per_cent),
        _said("more than {} left", condition.remaining_above, show_bytes),
        _said("less than {} left", condition.remaining_below, show_bytes),
    )  # fmt: skip
    return " and ".join(one for one in said if one) or "always"


def do(action: Do) -> str:
    """What a rule does: "raise the downtime by 50 ms, to 500 ms at most"."""
    match action:
        case RaiseDowntime():
            by, to = show_seconds(action.by), show_seconds(action.to)
            return f"raise the allowed downtime by {by} a pass, to {to} at most"
        case Throttle():
            how = action.how
            return (
                f"slow the guest down: {how.initial} % of its CPU time,"
                f" then {how.increment} % more each time, {how.at_most} % at most"
            )
        case Compress():
            return f"send differences only (xbzrle, cache of {show_bytes(action.cache)})"
        case StartPostcopy():
            return "switch to post-copy, where the guest and both hosts can"
        case Pause():
            return "stop the guest until it runs on the target"
        case GiveUp():
            return "give up; the guest stays where it is"
        case _:
            assert_never(action)


def schedule(one: Schedule) -> str:
    """When and where: "daily 03:00, memory and disks, into near (keeps 7 last)"."""
    what = "memory and disks" if one.memory else "disks alone"
    what += " of all guests at one moment" if one.group else ""
    said = [f"{one.text}, {what}, into {one.store or 'the first store'}{_kept(one.keep)}"]
    said += [f"copied to {copy.store}{_kept(copy.keep)}" for copy in one.copies]
    if one.verify is not None:
        said.append(f"verified every {period(one.verify.every)} ({one.verify.depth})")
    if isinstance(one.when, Auto):
        said.append(f"one failure in {period(one.when.one_failure_in)} assumed")
    return "; ".join(said)


def _kept(keep: Keep) -> str:
    return "" if keep.nothing_said else f" (keeps {keep})"


def _said(form: str, value: float | None, show: object = str) -> str:
    if value is None:
        return ""
    return form.format(show(value) if callable(show) else value)


def _per_cent(share: float) -> str:
    return f"{share * 100:g} %"
