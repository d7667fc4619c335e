"""The primary's agent: sets up and runs epochs, and cleans up when the protection ends."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vmckpt.agent.replication import handover, teardown, watchdog
from vmckpt.agent.replication.clock import ClockKeeper
from vmckpt.agent.replication.devices import Devices
from vmckpt.agent.replication.mirrors import Mirrors
from vmckpt.capture import migration_settings
from vmckpt.capture.memory import memory_files, ram_blocks, tracker
from vmckpt.capture.migration_settings import Undo
from vmckpt.capture.qemu_stream import device_state
from vmckpt.errors import LeaseLost, VmckptError
from vmckpt.hypervisor import standby_domain as libvirt_side
from vmckpt.hypervisor.lifecycle import Ending, Endings
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qemu_process.lease_timer import LeaseTimer
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.lease.clock import boottime
from vmckpt.model.epoch_cost import Finder
from vmckpt.replication.control_socket import Control, Request, Requests
from vmckpt.replication.disks.epoch_log import WriteLog
from vmckpt.replication.primary import network_buffer, tracked_memory
from vmckpt.replication.primary.copied_memory import CopiedMemory
from vmckpt.replication.primary.epoch_capture import Capturer, DeviceStateCapturer
from vmckpt.replication.primary.lease_holder import LeaseHolder
from vmckpt.replication.primary.loop import Primary, Switched
from vmckpt.replication.primary.memory import ProtectedMemory
from vmckpt.replication.primary.network_buffer import Buffers
from vmckpt.replication.primary.new_nics import Commands
from vmckpt.replication.primary.parts import Parts
from vmckpt.replication.primary.solo_permission import SoloPermission
from vmckpt.replication.primary.tracked_memory import MemoryBlock, TrackedMemory
from vmckpt.replication.protocol.connection import PeerConnection
from vmckpt.replication.session import Session, memory_of, private_blocks
from vmckpt.replication.status import PrimaryStatus
from vmckpt.replication.watchdog.rules import KillMethod
from vmckpt.units import Seconds

log = logging.getLogger("vmckpt.replica")

_TELLS = Seconds(2.0)
_SWITCHING = "switching"


def run_primary(session: Session, folder: Path, requests: Requests) -> None:
    """Run the agent until the protection ends or the guest stops.

    Raises Exception if the agent must be restarted.
    """
    with handover.only_agent(session, folder):
        process = identity.hold(session.guest)
        if process is None:
            _ended(session, folder, wished=False)
            return
        with process:
            _Agent(session, folder, requests, process).run()


class _Agent:
    """The agent, from its start until it finishes or fails."""

    def __init__(
        self, session: Session, folder: Path, requests: Requests, process: HeldProcess
    ) -> None:
        self._session, self.folder = session, folder
        self._requests, self._process = requests, process
        self._status = PrimaryStatus()
        self._leave = SoloPermission(needed=session.needs_leave)
        self._endings = Endings(session.guest, uri=session.uri)
        self._undo = Undo.from_json(session.undo)
        self._kill_method, why = watchdog.kill_method(session, process)
        if self._kill_method is not None:
            self._status.enforced(self._kill_method, why)
        self._page = watchdog.start_watchdog(session, folder, process, self._kill_method)
        self._stopped = 0.0
        """When the guest was last paused, by time.monotonic()."""

    def run(self) -> None:
        session, folder = self._session, self.folder
        try:
            with ExitStack() as stack:
                stack.enter_context(Control(folder, self._answer))
                stack.enter_context(self._endings)
                monitor = stack.enter_context(
                    QmpMonitor(session.guest, host=session.host, uri=session.uri)
                )
                lease_holder = stack.enter_context(self._lease_holder())
                if self._was_given_away(lease_holder):
                    teardown.switched(session, folder)
                    return
                self.resume(monitor)
                stack.enter_context(ClockKeeper(session, folder, self._status))
                parts = self._parts(monitor, lease_holder, stack)
                primary = Primary(session, folder, parts)
                try:
                    primary.run()
                except Switched:
                    teardown.switched(session, folder)
                    return
                if not (primary.standby_ended or self._leave.has()):
                    raise VmckptError(
                        f"the protection of {session.name} cannot end: its standby on"
                        f" {session.peer} may still take over"
                    )
                teardown.unprotect(session, folder, monitor, lease_holder)
        except Exception:
            if identity.runs(session.guest):
                raise
            _ended(session, folder, wished=self._endings.how(_TELLS) is Ending.WISHED)

    def _lease_holder(self) -> LeaseHolder:
        session = self._session
        # Use the kernel's timer inside QEMU if there is a lease and QEMU can be traced.
        by_kernel = self._kill_method is KillMethod.KERNEL
        return LeaseHolder(
            session.lease, self.folder, self._page, holder=session.host,
            note=self._status.note, lives=self._process.lives,
            restart_watchdog=self._restart_watchdog,
            enforcer=LeaseTimer(self._process) if by_kernel else None,
        )  # fmt: skip

    def _restart_watchdog(self) -> None:
        watchdog.start_watchdog(
            self._session, self.folder, self._process, self._kill_method
        ).close()

    def _was_given_away(self, lease_holder: LeaseHolder) -> bool:
        """Resolve a switchover that a dead agent left unfinished.

        Returns whether the guest was handed over. If not, the switchover can no longer complete.
        """
        if handover.handover_record(self.folder) is not None:
            handover.resend(self._session, self.folder)
            return True
        if not (self.folder / _SWITCHING).exists():
            return False
        try:
            lease_holder.invalidate()
        except LeaseLost:
            teardown.kill(self._process)
            return True
        return False

    def resume(self, monitor: QmpMonitor) -> None:
        """Resume the guest if a switchover or an agent that died has left the guest paused.

        Raises CaptureFailed, HypervisorError.
        """
        switching = self.folder / _SWITCHING
        if self._page.stopped or switching.exists():
            migration_settings.break_off(monitor, self._undo)
            self._page.stopped = 0.0
            switching.unlink(missing_ok=True)

    def _parts(self, monitor: QmpMonitor, lease_holder: LeaseHolder, stack: ExitStack) -> Parts:
        session, folder = self._session, self.folder
        migration_settings.set_bandwidth(monitor, migration_settings.NO_LIMIT)
        memory = self._memory(monitor, stack)
        mirrors = Mirrors(session, folder, monitor, self._still)
        begun = mirrors.begin()
        logs = [stack.enter_context(one) for one in mirrors.logs()]
        alone = teardown.is_alone(folder)
        filters, held = found_filters(session, folder, monitor, alone=alone)
        devices = stack.enter_context(
            Devices(
                monitor, folder, filters.new_cards, self._endings,
                known=session.extra.get("devices"),
            )
        )  # fmt: skip
        # The definition must be on disk before libvirt removes it.
        teardown.keep_definition(session)
        libvirt_side.undefine(monitor)
        capturer = self._capturer(monitor, memory, filters, logs)
        return Parts(
            monitor=monitor, memory=memory, capturer=capturer, logs=logs,
            buffers=filters, lease_holder=lease_holder, requests=self._requests,
            leave=self._leave, status=self._status,
            mirrors=mirrors, guest=_Guest(self, monitor, lease_holder, mirrors),
            begun=begun, held=held, unprotected=alone,
            whole=held and not begun and not lease_holder.acquired,
            devices=devices,
        )  # fmt: skip

    def _memory(self, monitor: QmpMonitor, stack: ExitStack) -> ProtectedMemory:
        """Return the guest's memory, with the method that was chosen when it was protected.

        Raises CannotTrack, CannotCapture, HypervisorError, OSError.
        """
        why = str(self._session.extra.get("finder_why", ""))
        if private_blocks(self._session) is None:
            self._status.finds(Finder.COMPARE, why)
            return CopiedMemory(
                lambda: memory_files.files(monitor, self._process), memory_of(self.folder), stack
            )
        tracker.end(monitor.guest)  # a snapshot may have been taken since `protect` examined it
        finder = Finder(self._session.extra.get("finder", Finder.WRITE_TRACKING))
        self._status.finds(finder, why or "the kernel reports written pages")

        def find() -> list[MemoryBlock]:
            return tracked_memory.blocks_of(ram_blocks.find(monitor, self._process), self._process)

        hot = tracked_memory.HOT_MOVE if self._session.moves else tracked_memory.HOT
        return TrackedMemory(self._process, find, stack, hot=hot, finder=finder)

    def _capturer(
        self, monitor: QmpMonitor, memory: ProtectedMemory, filters: Buffers,
        logs: Sequence[WriteLog],
    ) -> Capturer:  # fmt: skip
        private = private_blocks(self._session)
        if private is None:
            return Capturer(
                monitor, self._undo, finder=memory, output=filters, logs=logs, still=self._still
            )
        device_state.clean(monitor)
        return DeviceStateCapturer(
            monitor, self._undo, device_state.head_of(monitor, private), finder=memory,
            output=filters, logs=logs, still=self._still,
        )  # fmt: skip

    def _still(self, on: bool) -> None:
        self._stopped = time.monotonic() if on else self._stopped
        # A switchover may take a long time. The watchdog must not mistake the pause for a hang.
        switching = (self.folder / _SWITCHING).exists()
        self._page.stopped = boottime() if on and not switching else 0.0

    def hand_over(self, line: PeerConnection, lease_holder: LeaseHolder) -> None:
        """Hand the paused guest over to the other host. Raises VmckptError, OSError."""
        handover.hand_over(
            self._session, self.folder, line, lease_holder=lease_holder, process=self._process,
            stopped=self._stopped,
        )  # fmt: skip

    def _answer(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request on the control socket. Returns the agent's status, or an error."""
        request, session = told.get("wish"), self._session
        if request in (Request.END, Request.PLANNED):
            self._requests.add(Request(str(request)))
        elif request == Request.RUN_UNPROTECTED:
            if not self._leave.grant(str(told.get("leave"))):
                return {"error": "the agent is not waiting for permission to run unprotected"}
        elif request is not None:
            return {"error": f"vmckpt's agent on {session.host} does not support {request!r}"}
        return {
            "guest": session.guest, "name": session.name, "host": session.host,
            "peer": session.peer, "session": session.session, "process": os.getpid(),
            "wished": self._requests.has(Request.PLANNED), "wants_leave": self._leave.wanted,
            **self._status.as_json(),
        }  # fmt: skip


class _Guest:
    """The operations on the guest that the epoch loop needs; see parts.ProtectedGuest."""

    def __init__(
        self, agent: _Agent, monitor: QmpMonitor, lease_holder: LeaseHolder, mirrors: Mirrors
    ) -> None:
        self._agent, self._monitor, self._lease_holder = agent, monitor, lease_holder
        self.disks = mirrors.disks

    def note_unprotected(self, unprotected: bool) -> None:
        if unprotected:
            teardown.note_alone(self._agent.folder)
        else:
            (self._agent.folder / teardown.ALONE).unlink(missing_ok=True)

    def note_switchover(self) -> None:
        (self._agent.folder / _SWITCHING).touch()

    def hand_over(self, line: PeerConnection) -> None:
        self._agent.hand_over(line, self._lease_holder)

    def resume(self) -> None:
        self._agent.resume(self._monitor)


def found_filters(
    session: Session, folder: Path, monitor: Commands, *, alone: bool
) -> tuple[Buffers, bool]:
    """Take over the guest's network filters from an earlier agent.

    Returns the filters, and whether all of them exist; only then is all output buffered. If a
    filter is missing, the other filters release no output, since the standby may still take over.
    `alone`: the guest is running unprotected, so the filters are removed. Raises HypervisorError,
    OSError.
    """
    filters = Buffers(monitor, session.cards, folder, session.owner)
    held = network_buffer.there(monitor, session.cards) and not alone
    if alone:
        network_buffer.remove(monitor, folder)
    else:
        filters.attach()
    return filters, held


def _ended(session: Session, folder: Path, *, wished: bool) -> None:
    """Clean up after the guest's QEMU has terminated.

    `wished`: see teardown.guest_ended. Raises VmckptError.
    """
    if handover.handover_record(folder) is None:
        teardown.guest_ended(session, folder, wished=wished)
        return
    handover.finish(session, folder)
    teardown.switched(session, folder)
