"""The clock that leases are measured by is the machine's time since it was booted."""

import time
from itertools import pairwise
from pathlib import Path

import pytest

from vmckpt.lease.clock import boottime


def test_it_is_the_time_since_boot_with_all_sleep() -> None:
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    assert boottime() == pytest.approx(uptime, abs=1.0)


def test_it_only_goes_on_whatever_the_machines_other_clocks_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    looks = [boottime() for _ in range(100)]
    assert all(first <= second for first, second in pairwise(looks))
    time.sleep(0.02)
    assert boottime() - looks[-1] >= 0.02
