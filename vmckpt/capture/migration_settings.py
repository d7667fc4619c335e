"""Change QEMU's migration settings for a capture, and restore them, also from another process.

The settings to restore are recorded before the first change (intent before action). `break_off`
needs only this record, and works no matter when the capture died. After a background snapshot,
`break_off` must run as root on the guest's host.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from vmckpt.capture.memory import unblock_writes
from vmckpt.errors import CannotCapture, CaptureFailed, HypervisorError
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.units import Seconds

# libvirt keeps this capability on, and needs it for its own migrations.
EVENTS = "events"
BACKGROUND = "background-snapshot"
IGNORE_SHARED = "x-ignore-shared"
# QEMU's default limit of 128 MiB/s would delay the guest's writes.
NO_LIMIT = 1 << 50
# Name under which the pipe is passed to QEMU (getfd).
PIPE = "vmckpt"

ACTIVE = ("setup", "active", "device", "wait-unplug", "pre-switchover", "cancelling", "colo")
# QEMU is completing a migration, and must not be sent commands.
_BUSY = ("finish-migrate",)
STOPPED = ("paused", "postmigrate")
_PATIENCE = Seconds(20.0)
_RESCUE_TURN = 0.05


class Commands(Protocol):
    """The part of `hypervisor.qmp.QmpMonitor` that captures use."""

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
    """The undo record of a capture: the settings before it began."""

    guest: str
    """UUID of the guest."""
    capabilities: dict[str, bool]
    """Original values of the capabilities that the capture changes."""
    bandwidth: int
    """QEMU's max-bandwidth, in bytes per second."""
    runs: bool
    """Whether the guest is to run after the capture."""
    folder: str
    """Directory to remove with its contents; an empty string if there is none."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Undo":
        """Parse a record from JSON. Raises ValueError if the text is not a valid record."""
        told = json.loads(text)
        try:
            undo = cls(**told)
        except TypeError as exc:
            raise ValueError(f"invalid undo record of a capture: {text[:60]!r}") from exc
        forms = {"guest": str, "capabilities": dict, "bandwidth": int, "runs": bool, "folder": str}
        wrong = [key for key, form in forms.items() if not isinstance(told[key], form)]
        if wrong or not all(isinstance(on, bool) for on in undo.capabilities.values()):
            raise ValueError(f"invalid undo record of a capture: {text[:60]!r}")
        return undo


Note = Callable[[Undo], None]
"""Stores the undo record so that it outlives this process. Called before the first change."""


def changed(now: Mapping[str, bool], want: str | None) -> dict[str, bool]:
    """Return the current values of the capabilities that must change.

    Only `want` and "events" may be on during the capture. Raises KeyError if QEMU lacks `want`.
    """
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
    """Return the undo record for a capture, without changing anything.

    `want`: the capability that the capture needs, if any; `runs`: whether the guest is to run
    afterwards, None: only if it is running now; `folder`: a directory to remove when the capture is
    undone. Raises CannotCapture if the guest is being migrated, its state forbids a capture, or
    QEMU lacks the capability; and HypervisorError.
    """
    status = monitor.ask("query-migrate").get("status", "none")
    if status in ACTIVE or status.startswith("postcopy"):
        raise CannotCapture(
            f"{monitor.name} on {monitor.host} is being migrated ({status})",
            hint="try again when the migration has ended",
        )
    told = monitor.ask("query-migrate-capabilities")
    now = {str(one["capability"]): bool(one["state"]) for one in told}
    try:
        capabilities = changed(now, want)
    except KeyError:
        raise CannotCapture(
            f"QEMU of {monitor.name} on {monitor.host} does not support the migration capability"
            f" {want}",
            hint="upgrade QEMU on that host, or use another capture method",
        ) from None
    state = monitor.run_state()
    if state == "postmigrate":
        raise CannotCapture(
            f"{monitor.name} on {monitor.host} was paused by an earlier migration or snapshot;"
            " QEMU cannot capture the guest until it has been resumed",
            hint=f"run virsh resume {monitor.name} on {monitor.host}, then virsh suspend"
            f" {monitor.name} if the guest is to stay paused",
        )
    if state not in ("running", "paused"):
        raise CannotCapture(
            f"{monitor.name} on {monitor.host} is in state {state}, and only a running or paused"
            " guest can be captured",
            hint="try again when the guest is running",
        )
    return Undo(
        guest=monitor.guest,
        capabilities=capabilities,
        bandwidth=int(monitor.ask("query-migrate-parameters")["max-bandwidth"]),
        runs=state == "running" if runs is None else runs,
        folder=str(folder) if folder is not None else "",
    )


def set_capabilities(monitor: Commands, wanted: Mapping[str, bool]) -> None:
    """Set migration capabilities, each on or off, by QEMU's name. Raises HypervisorError."""
    if wanted:
        told = [{"capability": name, "state": on} for name, on in wanted.items()]
        monitor.tell("migrate-set-capabilities", {"capabilities": told})


def set_bandwidth(monitor: Commands, limit: int) -> None:
    """Limit QEMU's migration stream, in bytes per second. Raises HypervisorError."""
    monitor.tell("migrate-set-parameters", {"max-bandwidth": limit})


def apply(monitor: Commands, undo: Undo) -> None:
    """Change the settings for the capture. Raises HypervisorError.

    Toggles the recorded capabilities, and removes the bandwidth limit.
    """
    set_capabilities(monitor, {name: not on for name, on in undo.capabilities.items()})
    set_bandwidth(monitor, NO_LIMIT)


def restore(monitor: Commands, undo: Undo) -> None:
    """Restore the settings after a capture has ended, and resume the guest if it is to run.

    A guest that the user paused meanwhile stays paused. Raises HypervisorError, and CaptureFailed
    if the capture does not end.
    """
    wait_for_end(monitor)
    set_capabilities(monitor, undo.capabilities)
    set_bandwidth(monitor, undo.bandwidth)
    drop_pipe(monitor)
    if undo.runs and monitor.run_state() in STOPPED and not monitor.paused_by_user():
        monitor.tell("cont", {})


def break_off(monitor: Commands, undo: Undo, *, at_once: bool = False) -> None:
    """Cancel a capture that is running or has failed, and restore the settings; may be repeated.

    `at_once`: the capture has only just died, so a guest that is not to run is paused again. Raises
    HypervisorError, and CaptureFailed if the capture does not end or the guest may hang.
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
    """Let a capture complete while its stream is still read, then restore the settings.

    Waits until the capture has ended, or has made no progress for 20 s; only then cancels it. After
    a cancelled background snapshot, QEMU 7.2 keeps memory write-protected, and every migration
    fails until another background snapshot completes. `at_once`: as in `break_off`. Raises the same
    exceptions as `break_off`.
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
    """Removes the write protection of the guest's memory while a background snapshot is cancelled.

    Must be entered before any command is sent: QEMU's main loop can block on protected memory, and
    then QEMU answers no command. The snapshot is lost anyway, so the protection is not needed.
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
        """Remove the write protection once more, now that QEMU adds none. Raises CaptureFailed."""
        self._over.set()
        self._thread.join()
        try:
            self._free_for_good()
        except OSError as exc:
            if kind is None:
                raise CaptureFailed(
                    f"{self._monitor.name} on {self._monitor.host} may hang: a background snapshot"
                    f" failed, and the guest's memory is still write-protected: {exc}",
                    hint="run vmckpt recover with a login as root on that host",
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
            unblock_writes.free(self._process)


def wait_for_end(monitor: Commands) -> None:
    """Wait until QEMU's migration has ended. Raises CaptureFailed after 20 s, HypervisorError."""
    give_up = time.monotonic() + _PATIENCE
    while True:
        status = monitor.ask("query-migrate").get("status", "none")
        if status not in ACTIVE and monitor.run_state() not in _BUSY:
            return
        if time.monotonic() > give_up:
            raise CaptureFailed(
                f"QEMU of {monitor.name} on {monitor.host} did not finish the capture ({status})",
                hint="run on that host: virsh qemu-monitor-command --hmp"
                f" {monitor.name} info migrate",
            )
        time.sleep(0.01)


def why_failed(status: Mapping[str, Any]) -> str:
    """Return why a migration failed, from QEMU's answer to `query-migrate`."""
    if why := status.get("error-desc"):
        return str(why)
    if status.get("status") == "failed":
        # QEMU 7.2 gives no reason for late failures (migration_completion).
        return "QEMU gives no reason; flushing a disk or its mirror may have failed"
    return f"QEMU reports {status.get('status')!r}"


def capture_failed(monitor: Commands, why: str) -> CaptureFailed:
    """Return the error for a capture that failed."""
    return CaptureFailed(
        f"the capture of {monitor.name} on {monitor.host} failed: {why}",
        hint=f"see /var/log/libvirt/qemu/{monitor.name}.log on that host, then try again",
    )


def drop_pipe(monitor: Commands) -> None:
    """Close a pipe that was passed to QEMU but not used. Raises HypervisorError."""
    try:
        monitor.tell("closefd", {"fdname": PIPE})
    except HypervisorError as exc:
        if "not found" not in exc.message:
            raise
