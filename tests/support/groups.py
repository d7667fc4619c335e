"""A group's members, and the phases that they go through."""

from vmckpt.model.recovery import Phase

MEMBERS = frozenset({"a", "b"})
PHASES = list(Phase)
