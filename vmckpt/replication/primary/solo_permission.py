"""Permission to run unprotected, where no lease store can tell that the standby will never run.

Without a lease store, the controller powers a silent host off and runs the standby from its last
epoch. Output that the primary released since then would contradict that state. So the primary
releases none before the controller has recorded that the standby is invalid. Each request for the
permission has a name of its own: a permission that arrives late does not apply to the next request.
"""

import secrets
import threading


class SoloPermission:
    """The permission to run unprotected: one thread requests it, another one grants it."""

    def __init__(self, *, needed: bool) -> None:
        """`needed`: False if the guest always has the permission."""
        self._needed = needed
        self._lock = threading.Lock()
        self._asked: str | None = None
        self._given = False

    @property
    def wanted(self) -> str | None:
        """The name of the pending request, until `over`; None: there is none."""
        with self._lock:
            return self._asked

    def has(self) -> bool:
        """Return whether the permission was granted; request it if it was not."""
        if not self._needed:
            return True
        with self._lock:
            self._asked = self._asked or secrets.token_hex(8)
            return self._given

    def grant(self, name: str) -> bool:
        """Grant the request of that name. Returns whether it is pending."""
        with self._lock:
            known = self._asked is not None and secrets.compare_digest(name, self._asked)
            self._given = self._given or known
            return known

    def over(self) -> None:
        """Drop the request and the permission; the next `has` makes a new request."""
        with self._lock:
            self._asked, self._given = None, False
