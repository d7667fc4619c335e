"""The backup's agent: keeps the standby synchronised, and runs the guest at a failover."""

import logging
import os
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from vmckpt.agent import resumed_guest
from vmckpt.agent.replication import clock, handover, teardown, test_failover_files
from vmckpt.agent.replication import watchdog as replication_watchdog
from vmckpt.agent.replication.test_failover import Trials
from vmckpt.agent.resumed_guest import Reason
from vmckpt.errors import VmckptError
from vmckpt.hypervisor.guest_agent import GuestAgent
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.replication.backup import standby as standbys
from vmckpt.replication.backup import standby_setup
from vmckpt.replication.backup.epoch_stage import Stage
from vmckpt.replication.backup.lease_claimant import LeaseClaim, ManualClaim
from vmckpt.replication.backup.loop import Backup, StandbyGone, TakeoverGranted
from vmckpt.replication.backup.standby import Standby
from vmckpt.replication.control_socket import Control, Request, Requests
from vmckpt.replication.protocol.connection import ConnectionLost
from vmckpt.replication.protocol.messages import End
from vmckpt.replication.session import ProtectionOutcome, Session, memory_of, private_blocks
from vmckpt.replication.watchdog import process, shared_page
from vmckpt.replication.watchdog.restart import WatchdogRestart
from vmckpt.units import Seconds
from vmckpt.util import atomic_file

log = logging.getLogger("vmckpt.replica")

PORT = "port"
_SETTLES = Seconds(60.0)
_AGAIN = Seconds(1.0)
_WAITS = "inmigrate"


def run_backup(session: Session, folder: Path, requests: Requests) -> None:
    """Run the agent until the guest is running here or the protection ends.

    Raises VmckptError, OSError.
    """
    with handover.only_agent(session, folder):
        qemu = identity.hold(session.guest)
        if qemu is None:
            _lost(session, folder)
            return
        with qemu:
            try:
                _run_beside(session, folder, requests, qemu)
            except StandbyGone:
                _lost(session, folder)


def _lost(session: Session, folder: Path) -> None:
    if standby_setup.may_have_run(folder):
        if not (folder / teardown.OUTCOME).exists():
            teardown.outcome(
                folder,
                ProtectionOutcome.FAILED_OVER,
                f"the guest ran on {session.host}, and its QEMU has exited since",
            )
    else:
        teardown.outcome(folder, ProtectionOutcome.LOST, "the standby's QEMU is gone")
    _clear_test(session)
    (folder / process.OVER).touch()


def _run_beside(session: Session, folder: Path, requests: Requests, qemu: HeldProcess) -> None:
    watchdog = WatchdogRestart(
        replication_watchdog.start_watchdog(session, folder, qemu),
        lambda: replication_watchdog.start_watchdog(session, folder, qemu).close(),
    )
    with QmpMonitor(session.guest, host=session.host, uri=session.uri) as monitor:
        if standby_setup.is_ours(folder) and monitor.run_state() != _WAITS:
            _finish(session, folder, monitor)
            return
        # An earlier agent may have left a failover test attached to the standby's disks.
        _clear_test(session)
        with ExitStack() as stack:
            claim = (
                ManualClaim(folder) if session.lease is None
                else LeaseClaim(session.lease, session.host, folder)
            )  # fmt: skip
            stack.callback(claim.close)
            standby = stack.enter_context(
                Standby(
                    monitor, session.disks, folder, session.owner, kept_in=memory_of(folder),
                    private=private_blocks(session),
                )
            )  # fmt: skip
            stage = stack.enter_context(
                Stage(
                    memory_of(folder) / "stage", Path(session.state), standby.memory, standby.disks,
                    standby=f"{shared_page.identity(qemu.pid)}",
                )
            )  # fmt: skip
            trials = Trials(session, folder, stage, standby)
            stack.callback(trials.close)

            def between() -> None:
                watchdog.look()
                trials.turn()

            backup = Backup(
                session, folder, stage=stage, standby=standby, claim=claim, requests=requests,
                between=between, lives=qemu.lives,
            )  # fmt: skip
            ours = _watch(
                session, folder, backup, _Answers(session, backup, requests, trials), stack
            )
            trials.no_more()
            if ours is not None:
                # This cannot be undone: a restarted agent continues the takeover.
                standby_setup.adopt(session, folder)
                took = _run(session, folder, stage=stage, standby=standby, monitor=monitor,
                            ours=ours)  # fmt: skip
                why = f"{ours.why}; running after {1e3 * took:.1f} ms, from epoch {stage.committed}"
                behind = _behind(stage, ours)
                teardown.outcome(
                    folder, ProtectionOutcome.FAILED_OVER, why, behind_s=behind, took_s=took
                )
                trials.close()
                _settle(session, folder, monitor)
                _tell_guest(session, monitor, ours)
                (folder / process.OVER).touch()
                return
    (folder / process.OVER).touch()
    log.info("%s", standby_setup.remove(session, folder))


def _watch(
    session: Session, folder: Path, backup: Backup, answers: "_Answers", stack: ExitStack
) -> TakeoverGranted | None:
    if standby_setup.is_ours(folder):
        return TakeoverGranted(
            "vmckpt's agent was restarted during the takeover, and completed it", time.monotonic()
        )
    server = stack.enter_context(_listening(session, folder))
    stack.callback(backup.close)
    stack.enter_context(Control(folder, answers))
    return backup.run(server)


def _finish(session: Session, folder: Path, monitor: QmpMonitor) -> None:
    """Complete a takeover whose agent may have died after it loaded the guest."""
    if monitor.run_state() != "running":
        standby_setup.note_run(folder)
        standbys.go_on(monitor)
    with suppress(VmckptError):
        standbys.announce(monitor, list(session.cards))
    teardown.outcome(
        folder,
        ProtectionOutcome.FAILED_OVER,
        "vmckpt's agent was restarted during the takeover, and completed it",
    )
    _clear_test(session)
    _settle(session, folder, monitor)
    (folder / process.OVER).touch()


def _clear_test(session: Session) -> None:
    try:
        test_failover_files.clear(session)
    except (VmckptError, OSError) as exc:
        log.warning("removing a failover test failed: %s", exc)


def _listening(session: Session, folder: Path) -> socket.socket:
    """Listen on the earlier agent's port; on any port if there was no earlier agent."""
    known = 0
    with suppress(OSError, ValueError):
        known = int((folder / PORT).read_text())
    family = socket.AF_INET6 if ":" in session.address else socket.AF_INET
    server = socket.create_server((session.address, known), family=family, backlog=128)
    if (port := server.getsockname()[1]) != known:  # a full file system must not prevent a restart
        atomic_file.put(folder / PORT, str(port))
    return server


def _run(
    session: Session,
    folder: Path,
    *,
    stage: Stage,
    standby: Standby,
    monitor: QmpMonitor,
    ours: TakeoverGranted,
) -> float:
    """Run the guest. Returns how long the takeover took, in seconds. Raises VmckptError."""
    stage.apply()
    steps = standby.run(stage.state(), lambda: standby_setup.note_run(folder))
    running = time.monotonic()
    if ours.line is not None:
        with suppress(ConnectionLost):
            ours.line.send(End(why="the guest is running on the backup"))
    try:
        standbys.announce(monitor, list(session.cards))
    except VmckptError as exc:
        log.warning("switches may still send frames for %s to its old host: %s", session.name, exc)
    log.info("%s runs here, epoch %d: %s; %s", session.name, stage.committed, ours.why, steps)
    return running - ours.decided


def _behind(stage: Stage, ours: TakeoverGranted) -> float:
    """Return how much of the guest's work was lost, in seconds.

    This is the age of the last epoch at the time when the primary last answered.
    """
    taken = 0.0 if stage.last is None else stage.last.taken
    return max(0.0, time.time() - (time.monotonic() - ours.decided) - ours.silent - taken)


def _settle(session: Session, folder: Path, monitor: QmpMonitor) -> None:
    """Carry out the steps that can wait until the guest is running.

    Failed steps are retried for a minute; after that, `vmckpt recover` repeats them.
    """
    give_up = time.monotonic() + _SETTLES
    while True:
        try:
            standbys.settle(
                monitor, session.definition, autostart=bool(session.extra.get("autostart"))
            )
            standby_setup.note_settled(folder)
            return
        except VmckptError as exc:
            log.warning("%s", exc)
            if time.monotonic() > give_up:
                return
            time.sleep(_AGAIN)


def _tell_guest(session: Session, monitor: QmpMonitor, ours: TakeoverGranted) -> None:
    """Set the guest's clock, which lags by the lost time plus the failover's duration, and run the
    guest's hooks. Does nothing if its agent did not answer on the primary."""
    if ours.clock is None:
        return
    agent = GuestAgent(monitor)
    with suppress(VmckptError):
        clock.set_ahead(agent, ours.clock)
    with suppress(VmckptError):
        why = resumed_guest.run_hooks(agent, Reason.FAILOVER, session.name)
        if why:
            log.warning("%s: hooks in %s: %s", session.name, resumed_guest.HOOKS, why)


class _Answers:
    """Answers requests on the control socket."""

    def __init__(
        self, session: Session, backup: Backup, requests: Requests, trials: Trials
    ) -> None:
        self._session, self._backup, self._requests = session, backup, requests
        self._trials = trials

    def __call__(self, told: Mapping[str, Any]) -> dict[str, Any]:
        request = told.get("wish")
        if request in (Request.END, Request.FAILOVER):
            self._requests.add(Request(str(request)))
        elif request in (Request.TEST, Request.END_TEST):
            try:
                (self._trials.begin if request == Request.TEST else self._trials.end)()
            except (VmckptError, OSError) as exc:
                return {"error": str(exc)}
        elif request is not None:
            return {"error": f"vmckpt's agent on {self._session.host} does not support {request!r}"}
        return {
            "guest": self._session.guest, "name": self._session.name, "host": self._session.host,
            "peer": self._session.peer, "session": self._session.session, "process": os.getpid(),
            **self._backup.as_json(), "test": self._trials.as_json(),
        }  # fmt: skip
