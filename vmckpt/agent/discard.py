"""Taking a fork's images away that was only to be looked at; the guest has ended."""

from pathlib import Path
from typing import Any

from vmckpt.agent import replacement
from vmckpt.agent.afterwards import DiscardOrder
from vmckpt.agent.talk import Talk


def discard(order: DiscardOrder, _: Talk) -> dict[str, Any]:
    """Remove them, also those half made; may be repeated. Raises OSError."""
    removed = 0
    for place in map(Path, order.images.values()):
        for path in (place, *replacement.paths(place, order.snapshot)):
            removed += replacement.is_there(path)
            replacement.remove(path)
    return {"removed": removed}
