"""Convert the status of the source's agent into samples of a migration. Pure."""

from collections.abc import Mapping
from typing import Any

from vmckpt.model.migration import JobPhase, JobSample
from vmckpt.units import Bytes, BytesPerSecond, Seconds

_PAGE = 4096
_PHASES = {"copying": JobPhase.PRE_COPY, "protecting": JobPhase.PRE_COPY}
FIRST_COPY, EPOCHS = 1, 2
"""The two passes in this mode: the first copy, and all epochs after it."""


class Sampler:
    """Converts successive statuses into samples. `total`: bytes of memory and of copied disks."""

    def __init__(self, total: Bytes) -> None:
        self._total = total
        self.samples: list[JobSample] = []
        self.epochs = 0
        """Number of epochs committed so far."""
        self.sent = Bytes(0)

    def take(
        self, now: Seconds, told: Mapping[str, Any], downtime: Seconds | None
    ) -> JobSample | None:
        """Add the agent's status `told` as a sample. Returns None if the agent is not copying.

        `downtime`: the expected downtime of a switchover now.
        """
        phase = _PHASES.get(str(told.get("phase")))
        if phase is None:
            return None
        self.epochs = max(self.epochs, int(told.get("epoch") or 0))
        self.sent = Bytes(max(self.sent, int(told.get("sent") or 0)))
        before = self.samples[-1] if self.samples else None
        bandwidth = 0
        if before is not None and now > before.at:
            bandwidth = round((self.sent - before.transferred) / (now - before.at))
        sample = JobSample(
            at=now,
            phase=JobPhase.SWITCHOVER if told.get("wished") else phase,
            iteration=EPOCHS if self.epochs else FIRST_COPY,
            remaining=self._left(told),
            total=self._total,
            transferred=self.sent,
            bandwidth=BytesPerSecond(bandwidth),
            dirty_rate=_dirty_rate(told),
            expected_downtime=downtime,
            throttle=0,
        )
        self.samples.append(sample)
        return sample

    def setup(self, began: Seconds) -> Seconds | None:
        """Return the time from `began` to the first sample; None if there are no samples."""
        return Seconds(self.samples[0].at - began) if self.samples else None

    def _left(self, told: Mapping[str, Any]) -> Bytes:
        if self.epochs:
            return Bytes(int((told.get("last") or {}).get("bytes") or 0))
        if "pages_left" not in told:
            return Bytes(max(0, self._total - self.sent))
        return Bytes(int(told["pages_left"]) * _PAGE)


def _dirty_rate(told: Mapping[str, Any]) -> BytesPerSecond | None:
    """Return how many bytes per second the guest changed in the last epoch; None if unknown.

    A page counts once per epoch, no matter how often it was written.
    """
    last, interval = told.get("last"), told.get("interval_s")
    if not last or not interval:
        return None
    return BytesPerSecond(round(last["pages"] * _PAGE / interval))
