"""The pace at which lab guests write and are probed, which under TCG takes most of their CPU time.

Measurements need the full pace. A guest of 192 MiB with one vCPU that rewrites 1 MiB/s uses 30 % of
a core at this pace. At a quarter of the pace, it uses 12 %.
"""

import os

from vmckpt.errors import BadInput

PACE = "VMCKPT_LAB_PACE"
"""Environment variable: the pace relative to the full pace, by default 1."""


def parse(text: str) -> float:
    """Parse a pace. Raises BadInput."""
    try:
        pace = float(text)
    except ValueError:
        pace = 0.0
    if not 0.01 <= pace <= 1.0:
        raise BadInput(f"{PACE}={text} is not a valid pace", hint="use a number from 0.01 to 1")
    return pace


_PACE = parse(os.environ.get(PACE, "1"))
PROBE_INTERVAL = 1 / (200 * _PACE)
"""Seconds between two probes of a guest."""
RECORDS = max(1, round(50 * _PACE))
"""Records that a guest writes to its disk and reports, per second."""
CHATS = max(1, round(100 * _PACE))
"""Messages per second that a guest sends to each of its peers."""
PAUSE_MS = round(10 / _PACE)
"""Pause between two rewrites of a guest's memory region, in milliseconds."""
