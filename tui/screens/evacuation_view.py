"""Texts and columns for the screen of a job for a whole host. Pure."""

from collections.abc import Sequence

from vmckpt.journal.evacuation_progress import COMPLETED, WAITS, Turn, summary
from vmckpt.journal.records import Operation
from vmckpt.model.guest import FleetNow
from vmckpt.units import show_bytes, show_seconds
from vmckpt_tui.tables import Cell, Column
from vmckpt_tui.wording import bar, millis


def facts(operation: Operation, found: Sequence[Turn], now: float) -> Sequence[str]:
    """Return the lines above the list of migrations: progress, and guests that stay.

    `found`: the moves; `now`: in seconds since 1970.
    """
    told = summary(found)
    took = (operation.ended_at or now) - operation.began_at
    low, high = operation.detail.get("expected_ms") or (None, None)
    unknown = high is None and low is not None
    expected = f"{millis(low)} or more" if unknown else f"{millis(low)} to {millis(high)}"
    lines = [
        f"{bar(told.done, 20)} {told.done:.0%}: {told.arrived} arrived, {told.moving} moving,"
        f" {told.waiting} waiting, {told.failed} failed; {show_seconds(took)} of"
        f" {expected} expected"
    ]
    left = (operation.report or operation.detail).get("left") or ()
    # Journals of earlier versions have only the deprecated name of "hint".
    lines += [
        f"! stays: {one['guest']}: {one['why']} → {one.get('hint') or one.get('mend')}"
        for one in left
    ]
    return lines


def loads(fleet: FleetNow, operation: Operation, found: Sequence[Turn]) -> Sequence[str]:
    """Return a line for each host involved, with a bar of the memory used by its guests.

    `found`: the moves of the operation.
    """
    names = dict.fromkeys(
        [operation.source or "", *(one.source for one in found), *(one.target for one in found)]
    )
    used: dict[str, int] = {}
    for guest in fleet.guests:
        if guest.state.is_active:
            used[guest.host] = used.get(guest.host, 0) + guest.memory
    lines = []
    for host in fleet.hosts:
        if host.name in names and host.memory:
            share = used.get(host.name, 0) / host.memory
            told = f"{show_bytes(used.get(host.name, 0))} of {show_bytes(host.memory)}"
            lines.append(f"{host.name[:12]:<12} {bar(share, 24)} {share:4.0%}  {told}")
    return lines


def turn_columns() -> Sequence[Column[Turn]]:
    """Return the columns of the list of migrations."""

    def state(turn: Turn) -> Cell:
        if turn.state == WAITS:
            return "○ waiting", "dim"
        if turn.state == COMPLETED:
            return "✓ arrived", "good"
        if turn.active:
            return f"▶ {turn.state}", "bold"
        return f"✗ {turn.state}", "bad"

    def done(turn: Turn) -> Cell:
        sample = None if turn.view is None else turn.view.sample
        return ("", "") if sample is None else (f"{bar(sample.done, 8)} {sample.done:4.0%}", "")

    def window(turn: Turn) -> Cell:
        if turn.begins is None:
            return "–", "dim"
        end = "" if turn.ends is None else f" to +{show_seconds(turn.ends)}"
        return f"+{show_seconds(turn.begins)}{end}", "dim"

    return (
        Column(label="guest", width=12, grows=2, cell=lambda one: (one.guest, "")),
        Column(label="from → to", width=16, grows=1,
               cell=lambda one: (f"{one.source} → {one.target}", "")),
        Column(label="state", width=14, cell=state),
        Column(label="done", width=13, cell=done),
        Column(label="planned", width=18, cell=window, from_width=90),
        Column(label="tries", width=5, right=True, cell=lambda one: (str(one.tries or ""), "")),
    )  # fmt: skip
