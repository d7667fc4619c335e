"""What a capture switches on in QEMU, and how it is put back, also by somebody else later.

The facts are told before the first change (intent before action). `break_off` needs nothing but
them and is right whenever the capture died; for a background snapshot it must run on the guest's
host, as root.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from vmckpt.capture.memory import userfaultfd
from vmckpt.errors import CannotCapture, CaptureFailed, HypervisorError
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.units import Seconds

# libvirt keeps this one on and needs it for its own migrations.
EVENTS = "events"
BACKGROUND = "background-snapshot"
IGNORE_SHARED = "x-ignore-shared"
# QEMU's own limit of 128 MiB/s would hold the guest's writes up.
NO_LIMIT = 1 << 50
# Under which QEMU knows the pipe that we gave to it.
PIPE = "vmckpt"

ACTIVE = ("setup", "active", "device", "wait-unplug", "pre-switchover", "cancelling", "colo")
# QEMU is in the middle of a migration's end; nothing may be asked of it.
_BUSY = ("finish-migrate",)
STOPPED = ("paused", "postmigrate")
_PATIENCE = Seconds(20.0)
_RESCUE_TURN = 0.05


class Commands(Protocol):
    """What is used of `hypervisor.qmp.QmpMonitor`."""

    @property
    def host(self) -> str: ...
    @property
    def guest(self) -> str: ...
    @property
    def uri(self) -> str: ...
    @property
    def name(self) -> str: ...
    def ask(self, command: str, **arguments: object) -> Any: ...
    def tell(
        self, command: str, arguments: dict[str, object], *, files: tuple[int, ...] = ()
    ) -> Any: ...
    def run_state(self) -> str: ...
    def paused_by_user(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Undo:
    """What was so before a capture began."""

    guest: str
    """Its UUID."""
    capabilities: dict[str, bool]
    """Those that are changed, as they were."""
    bandwidth: int
    """QEMU's max-bandwidth, in bytes per second."""
    runs: bool
    """It ran, or is to run afterwards."""
    folder: str
    """To be removed, with what is in it; empty: none."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Undo":
        """Raises ValueError if it is none."""
        told = json.loads(text)
        try:
            undo = cls(**told)
        except TypeError as exc:
            raise ValueError(f"no facts of a capture: {text[:60]!r}") from exc
        forms = {"guest": str, "capabilities": dict, "bandwidth": int, "runs": bool, "folder": str}
        wrong = [key for key, form in forms.items() if not isinstance(told[key], form)]
        if wrong or not all(isinstance(on, bool) for on in undo.capabilities.values()):
            raise ValueError(f"no facts of a capture: {text[:60]!r}")
        return undo


Note = Callable[[Undo], None]
"""Writes the facts down, so that they outlive us; called before the first change."""


def changed(now: Mapping[str, bool], want: str | None) -> dict[str, bool]:
    """The capabilities that must change, as they are now. Only `want` and events may be on."""
    if want is not None and want not in now:
        raise KeyError(want)
    wrong: dict[str, bool] = {
        name: on for name, on in now.items() if on and name not in (want, EVENTS)
    }
    if want is not None and not now[want]:
        wrong[want] = False
    return wrong


def settings_facts(
    monitor: Commands, *, want: str | None, runs: bool | None, folder: Path | None
) -> Undo:
    """The facts before a capture. `runs`: whether it must run afterwards; None: as it is now.

    Raises CannotCapture if something else migrates the guest, or QEMU has no such capability.
    """
    status = monitor.ask("query-migrate").get("status", "none")
    if status in ACTIVE or status.startswith("postcopy"):
        raise CannotCapture(
            f"{monitor.name} on {monitor.host} is in a migration ({status})",
            hint="try again when it has ended",
        )
    told = monitor.ask("query-migrate-capabilities")
    now = {str(one["capability"]): bool(one["state"]) for one in told}
    try:
        capabilities = changed(now, want)
    except KeyError:
        raise CannotCapture(
            f"QEMU of {monitor.name} on {monitor.host} does not know {want}",
            hint="use another way of capture",
        ) from None
    state = monitor.run_state()
    if state == "postmigrate":
        raise CannotCapture(
            f"{monitor.name} on {monitor.host} was paused by an earlier migration or snapshot,"
            " after which QEMU captures nothing until it has run again",
            hint="resume it, then pause it again if it shall not run",
        )
    if state not in ("running", "paused"):
        raise CannotCapture(
            f"{monitor.name} on {monitor.host} is {state}", hint="try again when it runs"
        )
    return Undo(
        guest=monitor.guest,
        capabilities=capabilities,
        bandwidth=int(monitor.ask("query-migrate-parameters")["max-bandwidth"]),
        runs=state == "running" if runs is None else runs,
        folder=str(folder) if folder is not None else "",
    )


def set_capabilities(monitor: Commands, wanted: Mapping[str, bool]) -> None:
    """Switch capabilities. Raises HypervisorError."""
    if wanted:
        told = [{"capability": name, "state": on} for name, on in wanted.items()]
        monitor.tell("migrate-set-capabilities", {"capabilities": told})


def set_bandwidth(monitor: Commands, limit: int) -> None:
    """Limit QEMU's stream, in bytes per second. Raises HypervisorError."""
    monitor.tell("migrate-set-parameters", {"max-bandwidth": limit})


def apply(monitor: Commands, undo: Undo) -> None:
    """Turn everything to what the capture needs: each capability to the other side, no limit."""
    set_capabilities(monitor, {name: not on for name, on in undo.capabilities.items()})
    set_bandwidth(monitor, NO_LIMIT)


def restore(monitor: Commands, undo: Undo) -> None:
    """Put everything back as it was; the guest goes on if it is to run. Raises HypervisorError.

    For a capture that has ended. What somebody paused meanwhile stays paused.
    """
    wait_for_end(monitor)
    set_capabilities(monitor, undo.capabilities)
    set_bandwidth(monitor, undo.bandwidth)
    drop_pipe(monitor)
    if undo.runs and monitor.run_state() in STOPPED and not monitor.paused_by_user():
        monitor.tell("cont", {})


def break_off(monitor: Commands, undo: Undo, *, at_once: bool = False) -> None:
    """The same for one that still runs, failed or died; may be repeated. Raises CaptureFailed, too.

    `at_once`: right after it died, so that a guest which was to stand still is stopped again.
    """
    with ExitStack() as stack:
        if BACKGROUND in undo.capabilities:
            stack.enter_context(Rescue(monitor))
        status = monitor.ask("query-migrate").get("status", "none")
        if status in ACTIVE:
            monitor.tell("migrate_cancel", {})
        restore(monitor, undo)
    if at_once and not undo.runs and monitor.run_state() == "running":
        monitor.tell("stop", {})


def give_up(monitor: Commands, undo: Undo, *, at_once: bool = False) -> None:
    """The same for one whose stream is still taken by somebody: QEMU comes to its end by itself.

    QEMU 7.2 keeps memory marked after a background snapshot that was broken off, and every
    migration fails until another one has come to its end.
    """
    left, since = None, time.monotonic()
    while time.monotonic() - since < _PATIENCE:
        told = monitor.ask("query-migrate")
        if told.get("status", "none") not in ACTIVE:
            break
        remaining = told.get("ram", {}).get("remaining")
        if remaining != left:
            left, since = remaining, time.monotonic()
        time.sleep(0.05)
    break_off(monitor, undo, at_once=at_once)


class Rescue:
    """Frees the guest's memory over and over while a background snapshot is broken off.

    Nothing may be asked before: QEMU's main loop itself can hang in such memory, and then answers
    nobody. What the snapshot would have become is of no interest any more.
    """

    def __init__(self, monitor: Commands) -> None:
        self._monitor = monitor
        self._process = identity.hold(monitor.guest)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rescue", daemon=True)

    def __enter__(self) -> "Rescue":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Once more, when nothing can protect it again. Raises CaptureFailed."""
        self._over.set()
        self._thread.join()
        try:
            self._free_for_good()
        except OSError as exc:
            if kind is None:
                raise CaptureFailed(
                    f"{self._monitor.name} on {self._monitor.host} may hang: a background snapshot"
                    f" broke off, and its memory is still write-protected: {exc}",
                    hint="run vmckpt recover as root on that host",
                ) from exc

    def _run(self) -> None:
        while not self._over.is_set():
            with suppress(OSError):
                self._free()
            self._over.wait(_RESCUE_TURN)

    def _free_for_good(self) -> None:
        try:
            self._free()
        finally:
            if self._process is not None:
                self._process.close()

    def _free(self) -> None:
        if self._process is not None and self._process.lives():
            userfaultfd.free(self._process)


def wait_for_end(monitor: Commands) -> None:
    """Wait until QEMU is through with a migration. Raises CaptureFailed."""
    give_up = time.monotonic() + _PATIENCE
    while True:
        status = monitor.ask("query-migrate").get("status", "none")
        if status not in ACTIVE and monitor.run_state() not in _BUSY:
            return
        if time.monotonic() > give_up:
            raise CaptureFailed(
                f"QEMU of {monitor.name} on {monitor.host} does not end the capture ({status})",
                hint="look at query-migrate there",
            )
        time.sleep(0.01)


def why_failed(status: Mapping[str, Any]) -> str:
    """Why a migration has failed, from QEMU's answer to `query-migrate`."""
    if why := status.get("error-desc"):
        return str(why)
    if status.get("status") == "failed":
        # Of what ends a migration late, QEMU 7.2 leaves this out (migration_completion).
        return "QEMU gives no reason, as if a disk, or what it is mirrored to, could not be flushed"
    return f"QEMU says {status.get('status')!r}"


def capture_failed(monitor: Commands, why: str) -> CaptureFailed:
    """The error for a capture that broke off."""
    return CaptureFailed(
        f"the capture of {monitor.name} on {monitor.host} broke off: {why}",
        hint="look at QEMU's log there, then try again",
    )


def drop_pipe(monitor: Commands) -> None:
    """Let QEMU forget a pipe that it was given and did not use."""
    try:
        monitor.tell("closefd", {"fdname": PIPE})
    except HypervisorError as exc:
        if "not found" not in exc.message:
            raise
