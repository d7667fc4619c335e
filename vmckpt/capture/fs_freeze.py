"""The guest's file systems held still around the instant of a snapshot, never longer than a limit.

Whatever happens they go on: at the end, when the limit is reached (a thread of its own sees to
that), and after a crash by recovery, from the facts that were noted first.
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
    """What is used of `hypervisor.guest_agent.GuestAgent`."""

    def there(self) -> bool: ...
    def frozen(self) -> bool: ...
    def freeze(self, *, limit: Seconds) -> int: ...
    def thaw(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FsFreezeUndo:
    """Whose file systems may be held still."""

    guest: str
    """Its UUID."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError if it is none."""
        told = json.loads(text)
        if not isinstance(told, dict) or not isinstance(told.get("guest"), str):
            raise ValueError(f"no facts of a freeze: {text[:60]!r}")
        return cls(guest=told["guest"])


class FsFreeze:
    """File systems held still while it is open. Use as `with FsFreeze(...) as quiet`.

    A guest without an agent, or with one that fails, is captured all the same, as after a power
    cut; `finding` says so. `release` lets it go on before the end.
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
        """`guest` is a UUID. `note` writes the facts down, before the first change."""
        self._agent, self._guest, self._limit = agent, guest, limit
        self._note, self._between = note, between
        self._lock = threading.Lock()
        self._held = False
        """It may be that file systems stand still."""
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
            self._trouble = ("not-frozen", f"they could not be held still: {exc}")
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
        """Whether they have stood still from the beginning until now."""
        return self._held and self._trouble is None

    def release(self) -> bool:
        """The instant is taken, they may go on; whether they stood still until now."""
        held = self.held
        self._let_go()
        return held

    def finding(self, guest: str) -> Finding | None:
        """What went wrong with it; None: nothing."""
        if self._trouble is None:
            return None
        code, why = self._trouble
        return Finding(
            code=code,
            severity=Severity.INFO if code == "no-agent" else Severity.WARNING,
            where=guest,
            text=f"its file systems are captured as after a power cut: {why}",
            hint="install qemu-guest-agent in it" if code == "no-agent" else None,
        )

    def _watch(self) -> None:
        if not self._done.wait(self._limit) and self._held:
            self._trouble = ("thawed-early", f"they may stand still for {self._limit:g} s at most")
            self._let_go()

    def _let_go(self) -> None:
        """Until it is sure that they go on, or nobody answers any more."""
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
                    log.warning("letting the guest's file systems go on: %s", exc)
            if self._held:
                self._held = False
                self._trouble = (
                    "still-frozen",
                    "they may still stand still, the guest agent does not answer;"
                    f" run virsh domfsthaw {self._guest}",
                )
