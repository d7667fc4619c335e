"""The steps of a protection in the journal; `recovery` has how each is finished and undone."""

from enum import StrEnum

READY = "protecting"
"""The phase of a protection whose standby could take over."""


class Step(StrEnum):
    """What protecting a guest does to two hosts."""

    PROTECT = "protect"
    """Agents are started on both; {"session", "primary", "backup", "lease", "images"}, these by
    host and disk."""
    FENCE = "fence"
    """The primary's host is powered off; {"host", "agent", "action"}."""
    ALONE = "alone"
    """The primary has leave to go on without its standby, which nothing may run any more; open
    until the standby is whole again; {"why"}."""
