"""Whoever gives an order to an engine."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from vmckpt.model.events import Event

Emit = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whoever gave the order: is told what happens, and may stop it."""

    emit: Emit
    warn: Callable[[str], None]
    """Told from any thread what does not stop the work."""
    stop: asyncio.Event
    turn: Callable[[], Coroutine[object, object, None]] | None = None
    """Waited for when all is looked at and before anything is changed, where several go one after
    the other; raises Cancelled if it does not come. None: it is its turn."""
