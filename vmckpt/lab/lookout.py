"""Whether ever two copies of a guest run, looked at all the time a lab is shaken.

`Together` decides and is pure; `Lookout` looks. That a copy runs is told by the CPU time of its CPU
threads, which stands still while a guest is stopped; so it is seen with libvirtd dead, too.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType

from vmckpt.errors import LabError
from vmckpt.lab.plan import LabPlan
from vmckpt.lab.processes import Census, Copy

INTERVAL = 0.1
# Less than that in one interval is a thread that was woken to be told something.
RUNS = 4_000_000


@dataclass(slots=True)
class Together:
    """Readings of CPU time, one after the other, and what they say.

    In a switchover the source runs in the first part of an interval and the target in the last.
    Two copies that both run in each of two intervals next to each other did run at the same time.
    """

    seen: list[str] = field(default_factory=list)
    """Every finding in a sentence."""
    _before: Mapping[Copy, int] = field(default_factory=dict)
    _ran_before: frozenset[Copy] = frozenset()

    def take(self, ran: Mapping[Copy, int], at: float) -> None:
        """CPU time of every copy, now."""
        now = frozenset(
            copy for copy, time_ in ran.items() if time_ - self._before.get(copy, time_) > RUNS
        )
        both = sorted(now & self._ran_before)
        for first, second in pairwise(both):
            if first.guest == second.guest:
                self.seen.append(f"at {at:.2f}: {first} runs, and so does {second}")
        self._before, self._ran_before = dict(ran), now


class Lookout:
    """Looks until it is left; use as a context manager around whatever is done to the lab."""

    def __init__(self, plan: LabPlan) -> None:
        self._census = Census(plan)
        self._together = Together()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="lookout", daemon=True)
        self._lock = threading.Lock()
        self.looks = 0

    def __enter__(self) -> "Lookout":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def two_copies(self) -> list[str]:
        """Every time that two copies of one guest ran, and forget them."""
        if not self._thread.is_alive():
            raise LabError("the lookout has ended: nobody knows whether two copies ran")
        with self._lock:
            found, self._together.seen = self._together.seen, []
        return found

    def _look(self) -> None:
        while not self._over.wait(INTERVAL):
            ran = {copy: self._census.ran(copy) for copy in self._census.copies()}
            with self._lock:
                self._together.take(ran, time.monotonic())
            self.looks += 1
