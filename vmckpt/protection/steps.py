"""The journal steps of a protection; `recovery` finishes or undoes each of them."""

from enum import StrEnum

READY = "protecting"
"""The phase of a protection whose standby can take over."""


class Step(StrEnum):
    """The actions on the two hosts, each with the keys of its intent in the journal."""

    PROTECT = "protect"
    """Agents are started on both hosts; {"session", "primary", "backup", "lease", "images"}, with
    the images by host and disk name."""
    FENCE = "fence"
    """The primary's host is powered off; {"host", "agent", "action"}."""
    ALONE = "alone"
    """The primary has permission to continue without its standby, which must no longer be started;
    open until the standby is complete again; {"why"}."""
