"""Buffer a guest's output: packets from the guest wait in QEMU until they are released.

Each network card gets a `filter-buffer`. Output is never buffered for longer than a limit: QEMU
releases older packets itself, and an undo process (`network_hold_undo_process`) removes the filters
if this process dies or hangs. QEMU buffers at most 10,000 packets and drops the rest, so buffer
output only briefly.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, Self

from vmckpt.capture import migration_settings
from vmckpt.capture.device_limits import CARDS_OUTSIDE
from vmckpt.capture.memory.undo_process import UndoProcess
from vmckpt.capture.network_cards import cards, why_not
from vmckpt.errors import CannotCapture, CaptureFailed, HypervisorError
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qmp import QmpRefused
from vmckpt.units import Seconds

LIMIT = Seconds(15.0)
"""Maximum time for which output is buffered."""
_MARGIN = Seconds(0.5)
HELD = b"h"
"""Message that notifies the undo process that buffering begins."""
_MARK = "vmckpt-hold-"
_VHOST = "/dev/vhost-net"


class Commands(migration_settings.Commands, Protocol):
    """The part of `hypervisor.qmp.QmpMonitor` that is used here."""

    def described(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldUndo:
    """The undo record of buffered output."""

    guest: str
    """UUID of the guest."""
    cards: tuple[str, ...]
    runs: bool
    """Whether the guest was running when the record was made."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse a record from JSON. Raises ValueError if the text is not a valid record."""
        told = json.loads(text)
        try:
            undo = cls(**(told | {"cards": tuple(told["cards"])}))
        except (TypeError, LookupError) as exc:
            raise ValueError(f"invalid undo record of buffered output: {text[:60]!r}") from exc
        words = all(isinstance(one, str) for one in (undo.guest, *undo.cards))
        if not words or not isinstance(undo.runs, bool):
            raise ValueError(f"invalid undo record of buffered output: {text[:60]!r}")
        return undo


def hold_facts(monitor: Commands) -> HoldUndo:
    """Return the undo record for buffering the guest's output, without changing anything.

    Raises CannotCapture, which names the cards whose output cannot be buffered, HypervisorError,
    OSError.
    """
    known = cards(monitor.described())
    vhost = uses_vhost(monitor.guest)
    reasons = [why for card in known if (why := why_not(card, vhost=vhost)) is not None]
    if reasons:
        raise CannotCapture(
            f"{monitor.name} on {monitor.host}: the guest's output cannot be buffered:"
            f" {', '.join(reasons)}",
            hint="use virtio cards on a bridge instead"
            if any(card.kind in CARDS_OUTSIDE for card in known)
            else f"run vmckpt prepare {monitor.name} --live",
        )
    names = tuple(card.name for card in known)
    return HoldUndo(guest=monitor.guest, cards=names, runs=monitor.run_state() == "running")


def uses_vhost(guest: str) -> bool:
    """Return whether the guest's QEMU, on this host, uses the kernel's vhost for any card.

    `guest`: the guest's UUID. Raises QemuUnclear.
    """
    process = identity.hold(guest)
    if process is None:
        return False
    with process:
        for file in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(file) == _VHOST:  # noqa: PTH115 - the link names a device
                    return True
    return False


class OutputHold:
    """Buffers a guest's output once. Use as `with OutputHold(...) as hold`.

    Leaving the block releases all output.
    """

    def __init__(
        self,
        monitor: Commands,
        undo: HoldUndo,
        *,
        limit: Seconds = LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`undo`: the result of `hold_facts`, which the caller has stored."""
        self._monitor, self._undo, self._limit, self._clock = monitor, undo, limit, clock
        self._keeper: UndoProcess | None = None
        self._since: float | None = None
        """When buffering began; None: nothing is buffered."""

    def __enter__(self) -> Self:
        facts = json.dumps({"undo": self._undo.to_json(), "limit": self._limit})
        self._keeper = UndoProcess(
            uri=self._monitor.uri, host=self._monitor.host, undo=facts, stream=None,
            module="vmckpt.capture.network_hold_undo_process",
        )  # fmt: skip
        self._keeper.__enter__()
        return self

    def __exit__(
        self, kind: object = None, error: BaseException | None = None, trace: object = None
    ) -> None:
        """Release the output. Raises CaptureFailed if some of it may still be buffered."""
        self.drop()
        if self._keeper is not None:
            self._keeper.__exit__(kind, error, trace)

    def begin(self) -> None:
        """Buffer all output from now on. Raises CannotCapture, HypervisorError."""
        assert self._keeper is not None
        self._keeper.tell(HELD)
        self._since = self._clock()
        try:
            for card in self._undo.cards:
                self._monitor.tell("object-add", _filter(card, self._limit))
        except QmpRefused as exc:
            raise CannotCapture(
                f"{self._monitor.name} on {self._monitor.host}: the guest's output cannot be"
                f" buffered: {exc.message}",
                hint=f"run vmckpt prepare {self._monitor.name} --live",
            ) from exc

    def let_go(self) -> Seconds:
        """Release all output, in order. Returns how long it was buffered.

        Raises CaptureFailed if some output may have been released earlier, HypervisorError, and
        ValueError if no output is buffered.
        """
        if self._since is None:
            raise ValueError("no output is buffered")
        held = Seconds(self._clock() - self._since)
        gone = remove(self._monitor, self._undo.cards)
        self._over()
        if gone or held > self._limit - _MARGIN:
            raise CaptureFailed(
                f"{self._monitor.name} on {self._monitor.host}: output may have been released"
                f" before all guests were captured: it was buffered for {held:.1f} s, and is"
                f" released after {self._limit:g} s at the latest",
                hint="try again when the hosts and the network are less busy",
            )
        return held

    def drop(self) -> None:
        """Release all output after a failure. If the release fails, the undo process retries."""
        with suppress(HypervisorError):
            if self._since is not None:
                remove(self._monitor, self._undo.cards)
            self._over()

    def _over(self) -> None:
        self._since = None
        if self._keeper is not None:
            self._keeper.all_well()


def _filter(card: str, limit: Seconds) -> dict[str, object]:
    """Return a filter for packets that the guest sends, which is "rx" from the network's side.

    `card`: the card's name in QEMU; `limit`: QEMU releases the packets after this time.
    """
    return {
        "qom-type": "filter-buffer",
        "id": _MARK + card,
        "netdev": f"host{card}",
        "queue": "rx",
        "interval": int(limit * 1e6),
    }


def remove(monitor: migration_settings.Commands, names: Sequence[str]) -> tuple[str, ...]:
    """Remove the filters of network cards, which releases the buffered output.

    `names`: QEMU's names of the cards. Returns the cards that had no filter. Tries all cards before
    it raises HypervisorError.
    """
    gone, failed = [], None
    for name in names:
        try:
            monitor.tell("object-del", {"id": _MARK + name})
        except HypervisorError as exc:
            if "not found" in exc.message:
                gone.append(name)
            else:
                failed = exc
    if failed is not None:
        raise failed
    return tuple(gone)


def put_back(monitor: migration_settings.Commands, undo: HoldUndo, *, resume: bool = False) -> None:
    """Release the output that a dead group snapshot left buffered; may be repeated.

    `resume`: also resume a guest that was running before, unless the user paused it or a capture is
    running. Use `resume` when an agent hangs: the group snapshot has failed by then, so resuming
    cannot make it inconsistent. Raises HypervisorError.
    """
    remove(monitor, undo.cards)
    if not resume or not undo.runs or monitor.run_state() != "paused":
        return
    status = monitor.ask("query-migrate").get("status", "none")
    if status not in migration_settings.ACTIVE and not monitor.paused_by_user():
        monitor.tell("cont", {})
