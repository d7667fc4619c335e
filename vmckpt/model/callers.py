"""Whoever gives an order to an engine."""

import asyncio
from collections.abc import Callable
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
