"""Put something else in the place of a module's own, in a process that no fixture can reach."""

from types import ModuleType


def put(module: ModuleType, name: str, value: object) -> None:
    """Replace what a module has by that name. Raises AttributeError if it has nothing."""
    getattr(module, name)
    vars(module)[name] = value
