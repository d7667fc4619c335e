"""Freeze a guest's file systems around the instant of a snapshot, for a limited time.

The file systems are thawed at the end of the block, by a thread when the limit is reached, or,
after a crash, by recovery. Recovery uses a record that is stored before the freeze.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol, Self

from vmckpt.errors import HypervisorError
from vmckpt.model.finding import Finding, Severity
from vmckpt.units import Seconds

log = logging.getLogger("vmckpt.quiet")

_TRIES = 5
_BETWEEN = Seconds(0.5)


class Agent(Protocol):
    """The part of `hypervisor.guest_agent.GuestAgent` that is used here."""

    def there(self) -> bool: ...
    def frozen(self) -> bool: ...
    def freeze(self, *, limit: Seconds) -> int: ...
    def thaw(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FsFreezeUndo:
    """The undo record of a freeze."""

    guest: str
    """UUID of the guest whose file systems may be frozen."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse a record from JSON. Raises ValueError if the text is not a valid record."""
        told = json.loads(text)
        if not isinstance(told, dict) or not isinstance(told.get("guest"), str):
            raise ValueError(f"invalid undo record of a freeze: {text[:60]!r}")
        return cls(guest=told["guest"])


class FsFreeze:
    """Freezes a guest's file systems. Use as `with FsFreeze(...) as quiet`.

    Without a guest agent, or if the agent fails, the captured state is only crash-consistent, and
    `finding` returns the reason. `release` thaws the file systems before the end of the block.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        guest: str,
        limit: Seconds,
        note: Callable[[FsFreezeUndo], object],
        between: Seconds = _BETWEEN,
    ) -> None:
        """`guest`: a UUID. `limit`: maximum time until the thaw. `note`: stores the undo record;
        called before the first change. `between`: pause between attempts to thaw."""
        self._agent, self._guest, self._limit = agent, guest, limit
        self._note, self._between = note, between
        self._lock = threading.Lock()
        self._held = False
        """Whether file systems may be frozen."""
        self._trouble: tuple[str, str] | None = None
        self._done = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="thaw", daemon=True)

    def __enter__(self) -> Self:
        if not self._agent.there():
            self._trouble = ("no-agent", "no guest agent answers")
            return self
        self._note(FsFreezeUndo(guest=self._guest))
        self._held = True
        self._watching.start()
        try:
            self._agent.freeze(limit=self._limit)
        except HypervisorError as exc:
            self._trouble = ("not-frozen", f"freezing failed: {exc}")
            self._let_go()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go()
        self._done.set()
        if self._watching.ident is not None:
            self._watching.join()

    @property
    def held(self) -> bool:
        """Whether the file systems have been frozen since the block was entered."""
        return self._held and self._trouble is None

    def release(self) -> bool:
        """Thaw the file systems after the capture. Returns whether they were frozen until now."""
        held = self.held
        self._let_go()
        return held

    def finding(self, guest: str) -> Finding | None:
        """Return a finding if the freeze failed or ended early, or the thaw failed; else None.

        `guest`: the guest's name.
        """
        if self._trouble is None:
            return None
        code, why = self._trouble
        if code != "still-frozen":
            why = f"are only crash-consistent: {why}"
        return Finding(
            code=code,
            severity=Severity.INFO if code == "no-agent" else Severity.WARNING,
            where=guest,
            text=f"its file systems {why}",
            hint="install qemu-guest-agent in the guest" if code == "no-agent" else None,
        )

    def _watch(self) -> None:
        if not self._done.wait(self._limit) and self._held:
            self._trouble = ("thawed-early", f"they were thawed at the limit of {self._limit:g} s")
            self._let_go()

    def _let_go(self) -> None:
        """Thaw the file systems and check the result; give up after five attempts."""
        with self._lock:
            for attempt in range(_TRIES):
                if not self._held:
                    return
                if attempt:
                    time.sleep(self._between)
                try:
                    self._agent.thaw()
                    self._held = self._agent.frozen()
                except HypervisorError as exc:
                    log.warning("thawing the guest's file systems failed: %s", exc)
            if self._held:
                self._held = False
                earlier = "" if self._trouble is None else f"{self._trouble[1]}; "
                self._trouble = (
                    "still-frozen",
                    f"may still be frozen: {earlier}the guest agent did not thaw them;"
                    f" run virsh domfsthaw {self._guest}",
                )
