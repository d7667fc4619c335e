"""Choose the mode for a policy's `auto`, and score forecasts against measurements. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vmckpt.migration.forecast.forecast import Forecast, Range
from vmckpt.model.migration import Mode
from vmckpt.policy.model import Policy, StartPostcopy
from vmckpt.units import Bytes, Seconds, show_seconds

# QEMU applies the limit only to the sending of memory. Pages that the guest writes meanwhile,
# data in sockets and handshakes add to the downtime. Measured: 30 to 120 ms.
_WRITES, _CONTROL = 1.2, Seconds(0.15)
# Among modes of about the same duration, the one with the least impact and risk wins.
_ALIKE = 1.1
_GENTLE = (Mode.PRECOPY, Mode.HYBRID, Mode.POSTCOPY, Mode.STOP_AND_COPY)


def choose(
    forecasts: Sequence[Forecast], policy: Policy, *, post_copy_possible: bool
) -> tuple[Mode, str]:
    """Return the mode for `auto`, with the reason in words.

    Of the modes that are certain to complete with about the allowed downtime, the fastest wins; of
    modes within 10 % of its duration, the mode with the least impact and risk. If no mode is
    certain, hybrid is used if the policy may switch to post-copy, else pre-copy.

    Post-copy is considered only if the policy has a rule that starts it. Waits for pages then do
    not count against the limit: the rule's author preferred these waits to a longer migration. If
    the policy may switch and both fit, hybrid wins over pre-copy, as post-copy remains a fallback.
    Hybrid also wins over post-copy, with which the guest waits for most of its memory.
    `post_copy_possible`: the hosts and the guest permit post-copy.
    """
    switches = post_copy_possible and any(isinstance(r.do, StartPostcopy) for r in policy.rules)
    usable = [one for one in forecasts if switches or not one.mode.may_switch_early]
    limit = policy.limits.max_downtime
    fitting = [one for one in usable if _fits(one, limit)]
    if any(one.mode is Mode.HYBRID for one in fitting):
        fitting = [one for one in fitting if one.mode is not Mode.POSTCOPY]
    if not fitting:
        return _way_out(usable, limit, switches=switches)
    least = min(_longest(one) for one in fitting)
    alike = [one for one in fitting if _longest(one) <= _ALIKE * least]
    best = min(alike, key=lambda one: _GENTLE.index(one.mode))
    modes = {one.mode for one in fitting}
    if best.mode is Mode.PRECOPY and switches and Mode.HYBRID in modes:
        return Mode.HYBRID, "pre-copy completes within the limits; post-copy remains a fallback"
    total = best.shown().total
    why = f"{best.mode} takes {total.show(show_seconds)}" if total else str(best.mode)
    if len(fitting) == 1:
        return best.mode, f"{why}; of the modes considered, only this is certain to keep the limits"
    return best.mode, (
        f"{why}; of the modes considered, none that keeps the limits is more than 10 % faster"
    )


def _longest(one: Forecast) -> float:
    return float("inf") if one.total is None else one.total.high


def _fits(one: Forecast, limit: Seconds) -> bool:
    """Return whether the migration is certain to complete with about the allowed downtime.

    For modes that may switch to post-copy early, the downtime is not compared.
    """
    if one.converges is not True or one.total is None or one.downtime is None:
        return False
    return one.mode.may_switch_early or one.downtime.high <= _WRITES * limit + _CONTROL


def _way_out(usable: Sequence[Forecast], limit: Seconds, *, switches: bool) -> tuple[Mode, str]:
    """Return the mode to use if no mode fits, with the reason; the policy's rules then decide.

    `switches`: the policy may switch to post-copy.
    """
    mode = Mode.HYBRID if switches else Mode.PRECOPY
    words = []
    for one in usable:
        if one.converges is False:
            words.append(f"{one.mode} does not complete")
        elif one.converges is None:
            words.append(f"{one.mode} might not complete")
        elif one.downtime is not None:
            downtime = one.shown().downtime or one.downtime
            words.append(f"{one.mode} would have a downtime of {downtime.show(show_seconds)}")
    why = ", ".join(words) or "there is no forecast"
    tail = "; post-copy is the fallback" if switches else ""
    return mode, f"no mode is certain to keep the downtime to {show_seconds(limit)}: {why}{tail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measured values of a migration. None: unknown."""

    completed: bool
    total: Seconds | None
    downtime: Seconds | None
    sent: Bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An expected range and the measured value."""

    expected: Range
    measured: float
    covered: bool
    width: float
    """Half the width of the range, as a share of its middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How good a forecast was. A field is None if there is nothing to compare."""

    total: Mark | None
    downtime: Mark | None
    sent: Mark | None
    converged: bool | None
    """Whether completion was predicted correctly; None if there was no prediction."""

    def as_json(self) -> dict[str, Any]:
        marks: Mapping[str, Mark | None] = {
            "total": self.total,
            "downtime": self.downtime,
            "sent": self.sent,
        }
        return {
            **{name: None if one is None else _mark(one) for name, one in marks.items()},
            "converged": self.converged,
        }


def _mark(one: Mark) -> dict[str, Any]:
    return {
        "expected": [_finite(one.expected.low), _finite(one.expected.high)],
        "measured": one.measured,
        "covered": one.covered,
        "width": _finite(round(one.width, 3)),
    }


def _finite(value: float) -> float | None:
    """Return `value`, or None if it is infinite, which JSON cannot express."""
    return value if math.isfinite(value) else None


def score(forecast: Forecast, measured: Measured) -> Score:
    """Compare a forecast, as it was shown, with the measured values, and return the score.

    The downtime is compared only if a downtime was forecast and the migration completed.
    """
    forecast = forecast.shown()
    return Score(
        total=_against(forecast.total, measured.total),
        downtime=_against(forecast.downtime, measured.downtime) if measured.completed else None,
        sent=_against(forecast.sent, measured.sent),
        converged=None if forecast.converges is None else forecast.converges == measured.completed,
    )


def _against(expected: Range | None, measured: float | None) -> Mark | None:
    if expected is None or measured is None:
        return None
    return Mark(
        expected=expected,
        measured=measured,
        covered=expected.covers(measured),
        width=expected.width,
    )
