"""What the streams of moves on their way carry, while they do: others need not wait to know.

Pure.
"""

from vmckpt.model.migration import JobPhase, JobSample
from vmckpt.units import BytesPerSecond, Seconds

_TELLING = Seconds(1.0)
"""QEMU tells what it has sent ten times a second, and libvirt is asked less often."""


class Streams:
    """By the names of their guests."""

    def __init__(self) -> None:
        self._first: dict[str, JobSample] = {}
        self._last: dict[str, JobSample] = {}

    def heard(self, name: str, sample: JobSample) -> None:
        """What counts is what is sent while the guest runs on the source."""
        if sample.phase is JobPhase.PRE_COPY and sample.iteration:
            self._first.setdefault(name, sample)
            self._last[name] = sample

    def ended(self, name: str) -> None:
        """However it did."""
        self._first.pop(name, None)
        self._last.pop(name, None)

    def carry(self) -> dict[str, BytesPerSecond]:
        """On average so far; without those that are too young to tell."""
        found = {}
        for name, last in self._last.items():
            first = self._first[name]
            lasted, sent = last.at - first.at, last.transferred - first.transferred
            if lasted >= _TELLING and sent > 0:
                found[name] = BytesPerSecond(round(sent / lasted))
        return found
