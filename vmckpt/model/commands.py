"""Commands that are run on behalf of who looks on: what they print, and how they end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a command has printed, and how it ended."""

    text: str
    code: int | None
    """Its exit code; None: it runs."""


class Begun(Protocol):
    """A command that was started."""

    words: tuple[str, ...]
    pid: int

    def said(self) -> Said:
        """Up to now."""

    def stop(self) -> None:
        """As Ctrl-C does."""


class Commands(Protocol):
    """Runs commands."""

    async def ask(self, words: Sequence[str], width: int) -> Said:
        """One that only looks: wait for its end. Cancelled, it is ended."""

    def start(self, words: Sequence[str], width: int) -> Begun:
        """One that acts."""
