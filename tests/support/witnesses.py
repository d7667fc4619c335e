"""A witness that keeps to its rules and may be silent, without a database."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vmckpt.errors import LeaseLost
from vmckpt.lease.client import LeaseForgotten
from vmckpt.lease.clock import boottime
from vmckpt.lease.connection import LeaseUnreachable
from vmckpt.units import Seconds


class Witness:
    """Who holds the lease. All that is asked is noted."""

    def __init__(self) -> None:
        self.token, self.holder, self.state = 1, "", "free"
        self.down = False
        """Nothing arrives."""
        self.dumb = False
        """All is done, and no answer comes back."""
        self.asked: list[str] = []
        self._claims: dict[str, int] = {}
        self._lock = threading.Lock()

    def client(self, url: str, *, holder: str, limit: Seconds) -> "Client":
        del url, limit
        return Client(self, holder)

    def change(self, claim: str, holder: str, state: str) -> int:
        if claim not in self._claims:
            self.token, self.holder, self.state = self.token + 1, holder, state
            self._claims[claim] = self.token
        return self._claims[claim]

    def backup(self) -> Callable[[], None]:
        """Keep what is known now. Returns what fails over to a replica that knows no more."""
        kept, claims = (self.token, self.holder, self.state), dict(self._claims)

        def fail_over() -> None:
            with self._lock:
                self.token, self.holder, self.state = kept
                self._claims = dict(claims)

        return fail_over

    def ask(self, what: str, call: Callable[[], Any]) -> Any:
        with self._lock:
            self.asked.append(what)
            if self.down:
                raise LeaseUnreachable("the witness gave no answer")
            told = call()
            if self.dumb:
                raise LeaseUnreachable("the witness gave no answer")
            return told

    def count(self, what: str) -> int:
        return sum(one.startswith(what) for one in self.asked)


@dataclass
class Client:
    """One object of an agent's; it repeats a claim of its own."""

    witness: Witness
    holder: str
    closed: bool = False
    protected: bool = False

    def close(self) -> None:
        self.closed = True

    def _has(self, token: int, claim: str = "") -> None:
        has = (self.witness.token, self.witness.holder) == (token, self.holder)
        if not has and claim not in self.witness._claims:
            raise LeaseLost("the lease is lost: another holds it")

    def acquire(self) -> int:
        def call() -> int:
            if self.witness.holder not in ("", self.holder):
                raise LeaseLost("the lease is lost: another holds it")
            return self.witness.change(f"{id(self)} {time.monotonic()}", self.holder, "held")

        return int(self.witness.ask("acquire", call))

    def acquire_again(self, token: int) -> int:
        def call() -> int:
            if self.witness.holder not in ("", self.holder):
                raise LeaseLost("the lease is lost: another holds it")
            self.witness.token = max(self.witness.token, token)
            return self.witness.change(f"{id(self)} again {token}", self.holder, "held")

        return int(self.witness.ask(f"again {token}", call))

    def renew(self, token: int) -> Seconds | None:
        sent = boottime()

        def call() -> bool:
            witness = self.witness
            if witness.token < token and witness.holder in ("", self.holder):
                raise LeaseForgotten(f"the witness has forgotten token {token}")
            self.protected = witness.state == "protected"
            return (token, self.holder) == (witness.token, witness.holder)

        return sent if self.witness.ask(f"renew {token}", call) else None

    def validate(self, token: int) -> None:
        def call() -> None:
            self._has(token)
            self.witness.state = "protected"

        self.witness.ask(f"validate {token}", call)

    def invalidate(self, token: int) -> int:
        return self._changed(f"invalidate {token}", token, self.holder)

    def hand_over(self, token: int, to: str) -> int:
        return self._changed(f"hand over {token}", token, to)

    def release(self, token: int) -> None:
        self._changed(f"release {token}", token, "")

    def _changed(self, what: str, token: int, holder: str) -> int:
        claim = f"{id(self)} {what}"

        def call() -> int:
            self._has(token, claim)
            return self.witness.change(claim, holder, "held")

        return int(self.witness.ask(what, call))
