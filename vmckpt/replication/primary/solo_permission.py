"""Leave to go on without the standby, where no lease store can say that nobody will run it.

A host that is silent is powered off by its controller then, and the standby goes on from its last
epoch. What the primary has let out since would be forgotten, so it lets nothing out before the
controller has written down that the standby is worth nothing. Each wait asks under a name of its
own: leave that arrives late is none for the next.
"""

import secrets
import threading


class SoloPermission:
    """Wanted by one thread, given by another."""

    def __init__(self, *, needed: bool) -> None:
        """Not `needed`: it is always there."""
        self._needed = needed
        self._lock = threading.Lock()
        self._asked: str | None = None
        self._given = False

    @property
    def wanted(self) -> str | None:
        """The name that it is to be given under, until it is used or needed no more; None: nobody
        waits for it."""
        with self._lock:
            return self._asked

    def has(self) -> bool:
        """Whether it is there; asks for it if not."""
        if not self._needed:
            return True
        with self._lock:
            self._asked = self._asked or secrets.token_hex(8)
            return self._given

    def grant(self, name: str) -> bool:
        """Whether somebody waits for it under that name."""
        with self._lock:
            known = self._asked is not None and secrets.compare_digest(name, self._asked)
            self._given = self._given or known
            return known

    def over(self) -> None:
        """It was used, or is needed no more: the next time it is asked for anew."""
        with self._lock:
            self._asked, self._given = None, False
