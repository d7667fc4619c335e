"""Extensions of vmckpt by other packages: entry points, by group and name.

vmckpt.commands      a `cli.commands.Place`, by the command's name
vmckpt.inventories   a function that returns a hosts.yaml if nothing else names one, or None
vmckpt.observers     a class given the inventory's `observer`; see model.migration.OutsideView
"""

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any


def added(group: str) -> Iterator[tuple[str, Any]]:
    """Load each entry point of a group, and yield its name and the loaded object."""
    for one in entry_points(group=group):
        yield one.name, one.load()
