"""Extensions of vmckpt in other packages: entry points in these groups.

vmckpt.commands      a `cli.commands.Place`; the entry point's name is the command's name
vmckpt.inventories   a function that returns the path of the default hosts.yaml, or None
vmckpt.observers     a class called with the inventory's `observer`; see model.migration.OutsideView
"""

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any


def added(group: str) -> Iterator[tuple[str, Any]]:
    """Load the entry points of a group. Yields the name and the loaded object of each."""
    for one in entry_points(group=group):
        yield one.name, one.load()
