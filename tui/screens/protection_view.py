"""Texts and columns for protections. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vmckpt.protection import status
from vmckpt.units import show_bytes, show_seconds
from vmckpt_tui.tables import Cell, Column, guarded

Entry = Mapping[str, Any]
"""The status of a protection; see app.protection.job_status."""
_PARTS = "░▒▓█▚▞▙▟"
"""Patterns that distinguish the parts of a pause without colour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMark:
    """A sample of a protection's epochs."""

    pause_s: float
    behind_s: float
    bytes: float


def beat(entry: Entry) -> EpochMark | None:
    """Return a sample for the sparklines; None if the primary reports no epochs."""
    ours = said(entry, "primary")
    median = ours.get("median")
    if median is None:
        return None
    return EpochMark(
        pause_s=median["pause_s"], behind_s=ours.get("rpo_s") or 0.0, bytes=median["bytes"]
    )


def said(entry: Entry, role: str) -> Mapping[str, Any]:
    """Return the status that an agent reports. `role`: primary or backup."""
    told: Mapping[str, Any] = entry["says"].get(entry[role]) or {}
    return told


def parts(entry: Entry, width: int) -> Sequence[tuple[str, str, str]]:
    """Return the parts of the median pause: name, bar and duration.

    `width`: the total length of the bars, in characters.
    """
    median = said(entry, "primary").get("median") or {}
    known = {
        key.removeprefix("pause_").removesuffix("_s").replace("_", " "): took
        for key, took in median.items()
        if key.startswith("pause_") and key != "pause_s"
    }
    whole = median.get("pause_s") or sum(known.values()) or 1.0
    return [
        (name, pattern * max(took > 0, round(width * took / whole)), show_seconds(took))
        for (name, took), pattern in zip(known.items(), _PARTS * 4, strict=False)
    ]


def strip(entry: Entry, width: int) -> str:
    """Return an epoch as a line of `width` characters: running time, then the parts of the pause.

    Empty if the primary reports no epochs.
    """
    ours = said(entry, "primary")
    interval, median = ours.get("interval_s"), ours.get("median")
    if interval is None or median is None:
        return ""
    epoch = interval + median["pause_s"]
    runs: int = round(width * interval / epoch)
    stands = width - runs
    pause = "".join(bar for _, bar, _ in parts(entry, stands))[:stands]
    return "─" * runs + pause.ljust(stands, "█")


def rows(entry: Entry) -> Sequence[tuple[str, str]]:
    """Return the status as pairs of name and value."""
    seen, ours = status.parse_status(entry), said(entry, "primary")
    ready = "✓ ready" if seen.ready else "! not ready"
    then = [] if seen.next_step is None else [("next", seen.next_step)]
    guest = ("guest", f"{entry['guest']}, {entry['primary']} → {entry['backup']}")
    if seen.end is not None:
        return [guest, ("phase", seen.phase), ("ended", seen.end), *then]
    found = [
        guest,
        ("phase", seen.phase if seen.epoch is None else f"{seen.phase}, epoch {seen.epoch}"),
        ("standby", f"{ready}: {seen.ready_why}"),
        ("failover", status.decided_by(entry)),
        *then,
    ]
    if seen.in_the_way is not None:
        found.append(("problem", seen.in_the_way))
    if seen.behind_s is not None:
        worst = _time(ours.get("rpo_worst_s"))
        found.append(("behind (RPO)", f"{show_seconds(seen.behind_s)}, worst {worst}"))
    if seen.pause_s is not None:
        found.append(
            ("pause", f"{show_seconds(seen.pause_s)}, p99 {_time(ours.get('pause_p99_s'))}")
        )
    if seen.interval_s is not None:
        found.append(("interval", f"{show_seconds(seen.interval_s)} ({seen.interval_why})"))
    if seen.output_delay_s is not None:
        worst = _time(ours.get("output_delay_worst_s"))
        found.append(("output waits", f"{show_seconds(seen.output_delay_s)}, worst {worst}"))
    if (median := ours.get("median")) is not None:
        sent = f"{show_bytes(median['bytes'])}, {median['pages']:.0f} pages"
        found.append(("sent per epoch", sent))
    if seen.packets_lost:
        found.append(("packets lost", str(seen.packets_lost)))
    if (lease := _lease(entry)) is not None:
        found.append(("lease", lease))
    return found


def _lease(entry: Entry) -> str | None:
    """Return the lease state that each agent reports; None if no agent reports one."""
    told = [
        f"{entry[role]}: {said(entry, role)['lease']}"
        for role in ("primary", "backup")
        if said(entry, role).get("lease") is not None
    ]
    return "; ".join(told) or None


def _time(value: float | None) -> str:
    return "–" if value is None else show_seconds(value)


def guard_columns() -> Sequence[Column[Entry]]:
    """Return the columns of the list of protections."""

    def behind(entry: Entry) -> float:
        return status.parse_status(entry).behind_s or 0.0

    def pause(entry: Entry) -> Cell:
        seen = status.parse_status(entry)
        return (_time(seen.pause_s), "" if seen.pause_s is not None else "dim")

    return (
        Column(label="guest", width=12, grows=2, cell=lambda one: (str(one["guest"]), ""),
               order=lambda one: str(one["guest"])),
        Column(label="primary → backup", width=16, grows=1,
               cell=lambda one: (f"{one['primary']} → {one['backup']}", "")),
        Column(label="standby", width=13, cell=guarded),
        Column(label="phase", width=11, from_width=90,
               cell=lambda one: (status.parse_status(one).phase, "")),
        Column(label="behind", width=8, right=True, order=behind,
               cell=lambda one: (_time(status.parse_status(one).behind_s), "")),
        Column(label="pause", width=8, right=True, cell=pause),
        Column(label="output waits", width=12, right=True, from_width=100,
               cell=lambda one: (_time(status.parse_status(one).output_delay_s), "")),
        Column(label="failover", width=9, from_width=120,
               cell=lambda one: ("automatic" if one.get("automatic") else "manual", "dim")),
    )  # fmt: skip
