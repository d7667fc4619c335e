"""The status of a protection, as reported by an agent. Keys of durations end in "_s"."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from statistics import median
from typing import Any

from vmckpt.replication.disks.resync import Progress
from vmckpt.replication.guest_clock import Clock
from vmckpt.replication.primary.epoch_capture import Epoch
from vmckpt.replication.primary.pacing import Pace
from vmckpt.replication.protocol.connection import PeerConnection
from vmckpt.units import Seconds

_KEPT = 600
"""Number of latest epochs that medians are computed from."""
_RECENT = 5


class Phase(StrEnum):
    """The phase that a protection is in."""

    CONNECTING = "connecting"
    COPYING = "copying"
    """The backup is receiving missing data; it is ready only if it was ready before."""
    PROTECTING = "protecting"
    ALONE = "alone"
    """The guest is running unprotected, for example because the backup is lost."""
    ENDED = "ended"


class PrimaryStatus:
    """The status of the primary: its loop updates it, and other threads read it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._phase = Phase.CONNECTING
        self._line: PeerConnection | None = None
        self._heard = clock()
        self._told: dict[str, Any] = {}
        self._peer: dict[str, Any] = {}
        self._pauses: deque[float] = deque(maxlen=_KEPT)
        self._cycles: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._sent = 0
        """Bytes sent over earlier connections."""
        self._waits: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        """For each epoch, how long the guest ran, and how long the last packet waited."""
        self._worst_lag = 0.0
        self._taken: float | None = None
        self._held_since: float | None = None
        """When the open epoch began; None: output is not buffered, or this is the first epoch."""
        self._paused = 0.0
        self._clock_told: Clock | None = None
        self._began = clock()

    def phase(self, phase: Phase) -> None:
        with self._lock:
            self._phase = phase
            self._told.pop("says", None)

    def alone(self, why: str) -> None:
        """Record that the guest is unprotected until the next `phase`; `why` is shown to users."""
        with self._lock:
            self._phase, self._told["says"] = Phase.ALONE, why

    def devices_changed(self) -> None:
        """Record that a device was plugged or unplugged, so the standby no longer matches."""
        with self._lock:
            self._told["devices_changed"] = True

    def finds(self, finder: str, why: str) -> None:
        """Record which method finds changed pages, and why the method was chosen."""
        with self._lock:
            self._told["finder"], self._told["finder_why"] = finder, why

    def enforced(self, by: str, why_not: str | None) -> None:
        """Record the method that kills the guest when its lease ends.

        `why_not`: why the kernel does not kill the guest; None: the kernel kills the guest.
        """
        with self._lock:
            self._told["enforced_by"] = by
            if why_not is not None:
                self._told["enforced_why"] = why_not

    def let_out(self, lost: int) -> None:
        """Record that output is no longer buffered. `lost`: see `epoch`."""
        with self._lock:
            self._held_since = None
            self._told["packets_lost"] = lost

    def connected(self, line: PeerConnection) -> None:
        self._line, self._heard = line, self._clock()

    def cut(self, why: str) -> None:
        if self._line is not None:
            self._heard = max(self._heard, self._line.heard)
            self._sent += self._line.sent
            self._line = None
        self.say(why)

    def silent(self) -> Seconds:
        """Return the time since data was last received from the backup."""
        heard = self._line.heard if self._line is not None else self._heard
        return Seconds(self._clock() - heard)

    def say(self, what: str) -> None:
        """Record the current problem, as a message for users."""
        with self._lock:
            self._told["says"] = what

    def heard(self, peer: Mapping[str, Any]) -> None:
        """Record the status that the backup reports."""
        self._peer = dict(peer)

    def copied(self, left: int, *, ready: bool) -> None:
        """Record the progress of the first copy.

        `left`: number of pages that the backup still lacks; `ready`: the disks' mirrors are ready.
        """
        with self._lock:
            self._told["pages_left"], self._told["disks_ready"] = left, ready

    @property
    def paused(self) -> Seconds:
        """How long the guest has been paused for epochs, in total."""
        return Seconds(self._paused)

    def clock(self, clock: Clock) -> None:
        """Record what is known about the guest's clock."""
        with self._lock:
            self._clock_told = clock

    def compared(self, progress: Progress) -> None:
        """Record the progress of synchronising the disks, which is also shown afterwards."""
        with self._lock:
            self._told["disks_bytes"] = progress.whole
            self._told["disks_compared_bytes"] = progress.compared
            self._told["disks_sent_bytes"] = progress.sent

    def pace(self, pace: Pace) -> None:
        with self._lock:
            self._told["interval_s"], self._told["interval_why"] = pace.interval, pace.why

    def epoch(
        self, number: int, epoch: Epoch, *, size: int, busy: Seconds, sending: Seconds, lost: int
    ) -> None:
        """Record a committed epoch. `number`: its number.

        `size`: bytes sent for the epoch; `busy`: time from the capture to the acknowledgement;
        `sending`: time from the capture until everything was sent; `lost`: total number of packets
        that QEMU has dropped so far.
        """
        now = self._clock()
        with self._lock:
            if self._taken is not None:
                self._worst_lag = max(self._worst_lag, now - self._taken)
            self._taken = now - busy
            ran = 0.0
            if self._held_since is not None:
                ran = max(0.0, self._taken - epoch.pause - self._held_since)
            self._waits.append((ran, epoch.pause + busy))
            self._held_since = self._taken
            self._paused += epoch.pause
            self._cycles.append(
                {
                    "pause_s": epoch.pause, "busy_s": busy, "send_s": sending, "bytes": size,
                    "pages": sum(one.count for one in epoch.changed), "packets": epoch.packets,
                    **{f"pause_{key.replace(' ', '_')}_s": took
                       for key, took in epoch.phases.items()},
                }
            )  # fmt: skip
            self._told["epoch"] = number
            self._told["packets_lost"] = lost

    def note(self) -> dict[str, Any]:
        """Return the status that each heartbeat sends to the backup.

        The status is short, and repeats nothing that the backup has reported.
        """
        with self._lock:
            clock = self._clock_told
            return {
                "phase": str(self._phase), "epoch": self._told.get("epoch"),
                "clock_ahead_s": None if clock is None else clock.usual,
            }  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """Return the full status, for users and other tools."""
        with self._lock:
            now, line = self._clock(), self._line
            lag = None if self._taken is None else now - self._taken
            told: dict[str, Any] = {
                "role": "primary", "phase": str(self._phase), **self._told,
                "rpo_s": lag, "rpo_worst_s": max(self._worst_lag, lag or 0.0),
                "guest_stood_still_s": self._paused, "protected_for_s": now - self._began,
                **_clock(self._clock_told, self._paused),
                "standby": self._peer or None,
                "sent": self._sent + (0 if line is None else line.sent),
            }  # fmt: skip
            if self._cycles:
                keys = self._cycles[-1].keys()
                told["median"] = {
                    key: median(one.get(key, 0) for one in self._cycles) for key in keys
                }
                told["last"] = self._cycles[-1]
                told["recent"] = [
                    {key: one[key] for key in ("pause_s", "busy_s")}
                    for one in list(self._cycles)[-_RECENT:]
                ]
                pauses = sorted(one["pause_s"] for one in self._cycles)
                told["pause_p99_s"] = pauses[int(0.99 * (len(pauses) - 1))]
                told |= self._delays(now)
            return told

    def _delays(self, now: float) -> dict[str, Any]:
        """Return the mean and worst delay of a packet that the guest sends at a random moment."""
        ran = sum(one for one, _ in self._waits)
        mean = sum(one * (one / 2 + more) for one, more in self._waits) / ran if ran else None
        worst = max(sum(one) for one in self._waits)
        # A packet that was sent right after the last epoch is still waiting.
        waits = 0.0 if self._held_since is None else now - self._held_since
        return {"output_delay_s": mean, "output_delay_worst_s": max(worst, waits)}


def _clock(told: Clock | None, paused: float) -> dict[str, Any]:
    """Return the status of the guest's clock.

    `paused`: sum of all pauses in seconds, by which the clock lags if no guest agent corrects it.
    """
    if told is None:
        return {"guest_clock_behind_s": paused, "guest_clock_corrected": None}
    return {"guest_clock_behind_s": told.behind, "guest_clock_corrected": told.corrected}
