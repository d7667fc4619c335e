"""Texts, rows and charts for the screen of a migration. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vmckpt.journal import wording
from vmckpt.journal.jobs import JobDetail, News
from vmckpt.journal.records import StoredEvent, StoredForecast, StoredSample
from vmckpt.units import MIB, Seconds, show_bytes, show_rate, show_seconds
from vmckpt_tui.wording import millis

Points = tuple[tuple[float, ...], tuple[float, ...]]
"""Times in seconds, and the values at these times."""
_MOST_POINTS = 400
"""Number of samples for a chart: two points in each of 200 columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """The data of a chart."""

    title: str
    unit: str
    solid: Points
    dotted: Points | None = None
    band: tuple[Points, Points] | None = None
    """The two edges of the band."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An entry in the list of decisions."""

    at: float
    """Seconds since the migration began."""
    text: str
    tone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A pass over memory, with the values of its last sample."""

    number: int
    began: float
    lasted: float
    sent: int
    left: int
    dirty: float | None
    bandwidth: float


def followed(detail: JobDetail, news: News) -> JobDetail:
    """Return a job with new events and samples appended."""
    return JobDetail(
        view=news.view, forecast=detail.forecast, events=(*detail.events, *news.events),
        samples=(*detail.samples, *news.samples), requests=news.requests or detail.requests,
        steps=detail.steps,
    )  # fmt: skip


def facts(detail: JobDetail) -> Sequence[tuple[str, str]]:
    """Return the current figures as pairs of name and value."""
    operation = detail.view.operation
    report = operation.report or {}
    rows = [("phase", detail.view.doing)]
    if detail.samples:
        rows += _sampled(detail.samples[-1].values)
        if not report:
            rows += _outlook(detail)
    if report:
        rows += _ended(report)
    rows.append(("policy", f"{operation.policy or '–'}, {operation.mode or '–'}"))
    return rows


def _sampled(one: Mapping[str, Any]) -> list[tuple[str, str]]:
    dirty = one.get("dirty_rate")
    return [
        ("pass", str(one.get("iteration") or 0)),
        ("remaining", f"{show_bytes(one['remaining'])} of {show_bytes(one['total'])}"),
        ("bandwidth", show_rate(one["bandwidth"])),
        ("dirty rate", "–" if dirty is None else show_rate(dirty)),
        ("throttle", f"{one['throttle']} %" if one.get("throttle") else "none"),
    ]


def _outlook(detail: JobDetail) -> list[tuple[str, str]]:
    """Return the expected downtime, with its limit, and the remaining time."""
    one = detail.samples[-1].values
    limit = None if detail.forecast is None else detail.forecast.values.get("max_downtime_ms")
    beside = "" if limit is None else f", limit {millis(limit)}"
    return [
        ("downtime now", f"{millis(one.get('expected_downtime_ms'))}{beside}"),
        ("time left", _left(one)),
    ]


def _left(one: Mapping[str, Any]) -> str:
    return wording.time_left(
        _seconds(one.get("left_low_ms")), _seconds(one.get("left_high_ms")),
        converging=one.get("converging"),
    )  # fmt: skip


def _seconds(milliseconds: float | None) -> Seconds | None:
    return None if milliseconds is None else Seconds(milliseconds / 1000)


_REPORT = (
    ("total_ms", "total"),
    ("downtime_ms", "downtime, from QEMU"),
    ("observed_downtime_ms", "downtime, observed"),
)


def _ended(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(label, millis(report[key])) for key, label in _REPORT if report.get(key) is not None]
    if report.get("error"):
        rows.append(("error", str(report["error"])))
    return rows


def rates(samples: Sequence[StoredSample]) -> Lines:
    """Return the chart of bandwidth and dirty rate."""
    thin = _thinned(samples)
    known = [one for one in thin if one.values.get("dirty_rate") is not None]
    return Lines(
        title="— bandwidth  ··· dirty rate", unit="MiB/s",
        solid=_points(thin, "bandwidth", MIB),
        dotted=_points(known, "dirty_rate", MIB) if known else None,
    )  # fmt: skip


def remaining(samples: Sequence[StoredSample], forecast: StoredForecast | None) -> Lines:
    """Return the chart of the memory left to send, with the forecast as a band."""
    thin = _thinned(samples)
    # Pages of zeros are sent almost instantly; the forecast applies to the other pages.
    total = thin[0].values["remaining"] / MIB if thin else 0.0
    ends = None if forecast is None else expected(forecast.values)
    band = None
    if ends is not None and thin:
        band = (((0.0, ends[0]), (total, 0.0)), ((0.0, ends[1]), (total, 0.0)))
    title = "— remaining" + ("  ··· as forecast" if band else "")
    return Lines(title=title, unit="MiB", solid=_points(thin, "remaining", MIB), band=band)


def expected(values: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the forecast's shortest and longest total time, in seconds; None if unknown."""
    told = (values.get("expected") or {}).get("total_ms")
    if not told or None in told:
        return None
    return float(told[0]) / 1000, float(told[1]) / 1000


def _points(samples: Sequence[StoredSample], key: str, unit: int) -> Points:
    return (
        tuple(one.at for one in samples), tuple(float(one.values[key]) / unit for one in samples)
    )  # fmt: skip


def _thinned(samples: Sequence[StoredSample]) -> Sequence[StoredSample]:
    """Return at most about twice `_MOST_POINTS` samples, including the first and the last."""
    step = max(1, len(samples) // _MOST_POINTS)
    thin = list(samples[::step])
    if samples and thin[-1] is not samples[-1]:
        thin.append(samples[-1])
    return thin


def passes(samples: Sequence[StoredSample]) -> Sequence[Pass]:
    """Return the passes over memory; the last pass is as of the newest sample."""
    found: list[Pass] = []
    first: StoredSample | None = None
    for one in samples:
        number = one.values.get("iteration") or 0
        if number == 0:
            continue
        if first is None or number != first.values["iteration"]:
            first = one
            found.append(_pass(one, one))
        else:
            found[-1] = _pass(first, one)
    return found


def _pass(first: StoredSample, last: StoredSample) -> Pass:
    one = last.values
    return Pass(
        number=one["iteration"], began=first.at, lasted=last.at - first.at,
        sent=max(0, one["transferred"] - first.values["transferred"]), left=one["remaining"],
        dirty=one.get("dirty_rate"), bandwidth=one["bandwidth"],
    )  # fmt: skip


_TONES = {"decided": "bold", "checked": "warn"}


def event_line(event: StoredEvent) -> Told | None:
    """Return an event as an entry of the list; None if it is not shown."""
    text = wording.event(event.kind, event.values)
    tone = "" if event.values.get("rule") == "evacuate" else _TONES.get(event.kind, "dim")
    # The title of the list says that its lines are decisions.
    if text is None:
        return None
    return Told(at=event.at, text=text.removeprefix("decided "), tone=tone)


def story(detail: JobDetail) -> Sequence[Told]:
    """Return the events and the operators' requests, in the order of their times."""
    found = [line for event in detail.events if (line := event_line(event)) is not None]
    began = detail.view.operation.began_at
    for one in detail.requests:
        answer = "not answered" if one.ok is None else one.answer
        text = f"{one.asked_by} requested {one.kind} {wording.pairs(one.arguments)}".rstrip()
        found.append(Told(at=max(0.0, one.asked_at - began), text=f"{text}: {answer}"))
    return sorted(found, key=lambda one: one.at)


def elapsed(detail: JobDetail, now: float) -> str:
    """Return how long a job has been running, or how long it ran, as text.

    `now`: in seconds since 1970.
    """
    operation = detail.view.operation
    return show_seconds(max(0.0, (operation.ended_at or now) - operation.began_at))
