"""Bandwidth of a stream and overhead of a move, from past moves or by default. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from vmckpt.journal.migration_history import PastMove
from vmckpt.migration.forecast.forecast import Range
from vmckpt.model.migration import LinkSeen, Mode, Outcome
from vmckpt.units import MIB, show_count, show_rate, show_seconds

# One stream of QEMU keeps a CPU busy on each side. Measured over an unlimited link, QEMU 7.2 with
# guests under TCG on two shared cores: 165 to 950 MiB/s.
STREAM = Range(150.0 * MIB, 1200.0 * MIB)
# TLS runs in the same thread as the stream.
_TLS = 0.5
# libvirt's handshake and the start of the target's QEMU. Measured: 0.4 to 0.6 s, up to 1.5 s for
# the first move to a host or on a busy host.
SETUP = Range(0.35, 1.5)
# Device state and libvirt's last handshake. Measured: 10 to 60 ms.
STOP = Range(0.01, 0.08)
# QEMU's bandwidth relative to the probe's over a narrow link. Measured: 0.99 to 1.01.
_NARROW = Range(0.96, 1.015)
_NO_LINK = Range(10.0 * MIB, 1200.0 * MIB)
_ENOUGH = 10
_TELLING = 1.5
# A stream that used this share of the link was limited by the link.
_FILLS = 0.7


def _completed(past: Sequence[PastMove]) -> list[PastMove]:
    """Return the latest completed moves that used QEMU's migration, at most `_ENOUGH`."""
    ended = [one for one in past if one.outcome == Outcome.COMPLETED]
    return [one for one in ended if one.mode != Mode.CHECKPOINT][:_ENOUGH]


def _sending(move: PastMove) -> float | None:
    """Return for how long memory was sent, in seconds; None if unknown or too short to be reliable.

    QEMU updates its bandwidth every 100 ms, first after 100 ms; a few readings mean little.
    """
    if not move.transferred or not move.bandwidth:
        return None
    lasted = move.transferred / move.bandwidth
    return lasted if lasted >= _TELLING else None


def _unlimited(past: Sequence[PastMove]) -> list[float]:
    """Return the reliable bandwidths of completed moves that had no limit."""
    return [
        float(one.bandwidth) for one in _completed(past)
        if one.bandwidth and one.limit is None and _sending(one) is not None
    ]  # fmt: skip


def stream(past: Sequence[PastMove], *, encrypted: bool, connections: int) -> tuple[Range, str]:
    """Return the bandwidth of QEMU's stream if the link does not limit it, and the basis of this
    value in words. `connections`: number of parallel connections of the stream."""
    seen = _unlimited(past)
    if seen:
        # Few moves show less of the possible range than many.
        margin = 0.2 + 0.4 / len(seen)
        found = Range(min(seen) * (1 - margin), max(seen) * (1 + margin))
        return found, (
            f"{show_count(len(seen), 'past move')} reached"
            f" {Range(min(seen), max(seen)).show(show_rate)}"
        )
    found = STREAM
    if encrypted:
        found = Range(found.low * _TLS, found.high * _TLS)
    if connections > 1:
        found = Range(found.low, found.high * connections)
    return found, (
        "the bandwidth of QEMU's stream is unknown until a migration between these hosts has"
        f" measured it; the mode is chosen for {found.show(show_rate)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The expected bandwidth, in bytes per second, and what it is based on."""

    first: Range
    """Bandwidth in the first pass."""
    later: Range
    """Bandwidth in later passes."""
    basis: tuple[str, ...]
    known: bool = True
    """Whether the bandwidth was measured: a default may be wrong by any factor on a busy host."""


def bandwidth(
    link: LinkSeen | None, past: Sequence[PastMove], *, encrypted: bool, connections: int
) -> Carried:
    """Return the expected bandwidth.

    In the first pass the target's kernel allocates each page; later passes are up to four times as
    fast if the link permits. The bandwidths of past moves are mostly those of first passes. `link`:
    None if the link was not measured. `connections`: see `stream`.
    """
    ceiling, words = stream(past, encrypted=encrypted, connections=connections)
    fastest = max(ceiling.high, stream((), encrypted=encrypted, connections=connections)[0].high)
    seen = _unlimited(past)
    if link is None:
        first, said = (ceiling, words) if seen else (_NO_LINK, "the link was not measured")
        later = Range(first.low, fastest)
        return Carried(first=first, later=later, basis=(said,), known=bool(seen))
    narrow = Range(_NARROW.low * link.rate, _NARROW.high * link.rate)
    said = f"measured bandwidth of the link: {show_rate(link.rate)}"
    if narrow.high <= ceiling.low or (seen and min(seen) >= _FILLS * link.rate):
        return Carried(first=narrow, later=narrow, basis=(said,))
    both = Range(min(narrow.low, ceiling.low), min(narrow.high, ceiling.high))
    later = Range(both.low, min(narrow.high, fastest))
    return Carried(first=both, later=later, basis=(said, words), known=bool(seen))


def setup(past: Sequence[PastMove]) -> tuple[Range, str]:
    """Return the seconds from the order to the first byte, and the basis of this value in words.

    The value is the time that past moves took in addition to sending; if fewer than two past moves
    show this time, a default.
    """
    seen = sorted(
        one.total - lasted
        for one in _completed(past)
        if one.total and (lasted := _sending(one)) is not None
    )
    sane = [max(0.2, one) for one in seen if one < 30]
    if len(sane) < 2:
        return SETUP, f"default for the setup time: {SETUP.show(show_seconds)}"
    # The time for sending is an estimate, so the fastest setup may have been faster. The slowest of
    # many moves may be an outlier; the slowest of a few may be typical.
    slow = sane[-1] if len(sane) < 5 else sane[-2]
    found = Range(
        max(0.2, min(0.8 * sane[0], SETUP.low)), min(SETUP.high * 2, max(1.3 * slow, 1.5 * sane[0]))
    )
    return found, f"setup time, from {len(sane)} past moves: {found.show(show_seconds)}"
