"""Permission to run unprotected, for protections whose standby cannot be invalidated in a lease
store.

Without a lease store, the controller powers off a silent host and runs the standby from its last
epoch. Output that the primary has released since that epoch would contradict the standby's state.
So the primary releases no output until the controller has recorded that the standby is invalid.
Each request for the permission has its own name, so a permission that arrives late does not apply
to the next request.
"""

import secrets
import threading


class SoloPermission:
    """The permission to run unprotected: one thread requests it, another thread grants it."""

    def __init__(self, *, needed: bool) -> None:
        """`needed`: False if the guest always has the permission."""
        self._needed = needed
        self._lock = threading.Lock()
        self._asked: str | None = None
        self._given = False

    @property
    def wanted(self) -> str | None:
        """The name of the pending request, until `over`; None: no request is pending."""
        with self._lock:
            return self._asked

    def has(self) -> bool:
        """Return whether the permission was granted; if not, request it."""
        if not self._needed:
            return True
        with self._lock:
            self._asked = self._asked or secrets.token_hex(8)
            return self._given

    def grant(self, name: str) -> bool:
        """Grant the request with this name. Returns False if no such request is pending."""
        with self._lock:
            known = self._asked is not None and secrets.compare_digest(name, self._asked)
            self._given = self._given or known
            return known

    def over(self) -> None:
        """Drop the request and the permission; the next `has` makes a new request."""
        with self._lock:
            self._asked, self._given = None, False
