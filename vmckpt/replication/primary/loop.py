"""The primary's loop: it captures one epoch after another while the guest is protected.

The loop captures one epoch at a time and sends it. Once the backup has committed the epoch, its
output is released; meanwhile the guest runs in the next epoch. A lost connection does not end the
protection: the next epoch that arrives contains everything that the backup lacks.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from vmckpt.capture.memory.page_diff import Flags
from vmckpt.capture.memory.shared_memory import Resumed
from vmckpt.capture.memory.write_tracking import CannotTrack
from vmckpt.capture.migration_settings import ACTIVE
from vmckpt.errors import CannotCapture, HypervisorError, VmckptError
from vmckpt.lease.connection import LeaseUnreachable
from vmckpt.replication.control_socket import Request
from vmckpt.replication.dirty_pages.finder import Changed
from vmckpt.replication.disks import mirror_job
from vmckpt.replication.primary import pacing
from vmckpt.replication.primary.acknowledgement import await_ack, note
from vmckpt.replication.primary.epoch_capture import Epoch
from vmckpt.replication.primary.first_copy import FirstCopy
from vmckpt.replication.primary.memory import Blocks
from vmckpt.replication.primary.network_buffer import EARLY
from vmckpt.replication.primary.pacing import Cycle
from vmckpt.replication.primary.parts import Parts
from vmckpt.replication.primary.sender import Sender
from vmckpt.replication.protocol import connection
from vmckpt.replication.protocol.connection import ConnectionLost, PeerConnection
from vmckpt.replication.protocol.memory_layout import Dimm, Layout
from vmckpt.replication.protocol.messages import (
    End,
    EpochEnd,
    Heartbeat,
    Hello,
    HelloAck,
    LayoutAck,
    MemoryLayout,
    PeerRefused,
    WireError,
)
from vmckpt.replication.session import Session
from vmckpt.replication.status import Phase
from vmckpt.units import MIB, Bytes, Seconds

log = logging.getLogger("vmckpt.replica")

_CONNECT = Seconds(2.0)
_ANSWER = Seconds(30.0)
_AGAIN = Seconds(0.3)
_RARELY = Seconds(30.0)
"""Longest delay between two attempts at a first copy, after repeated failures."""
_POLL = Seconds(0.005)
_DEVICES = Seconds(2.0)
_UNPLUGS = Seconds(2.0)
"""After a network card is unplugged, libvirt removes its host interface within this time."""
_ENDS = Seconds(3.0)
_BUSY_LOG = 16 * MIB
"""An epoch ends early when the log of a disk exceeds this size."""


def poll_interval(left: float) -> Seconds:
    """Return how long to wait for a message when the next epoch is due in `left` seconds.

    An epoch that is overdue, because the guest is paused, is tried again after `_POLL`.
    """
    return Seconds(left) if 0.0 < left < _POLL else _POLL


@dataclass(frozen=True, slots=True)
class Flight:
    """An epoch between its capture and its commit."""

    number: int
    epoch: Epoch
    flags: list[Flags]
    """Flags of the epoch's pages, one entry per block of memory."""


class Switched(Exception):
    """A planned switchover is complete: the guest is paused, and the backup has all its state."""


class _Replugged(Exception):
    """A device was plugged or unplugged before the epoch was sealed, so the epoch is unusable."""


class Primary:
    """The loop of the primary: it runs until the protection ends or the guest is switched over."""

    def __init__(self, session: Session, folder: Path, parts: Parts) -> None:
        self._session, self._folder, self._parts = session, folder, parts
        self._number = 0
        """Number of the last captured epoch."""
        self._acked = 0
        self._state: bytes | None = None
        """Device state of the last acknowledged epoch; None: the backup's state is unknown."""
        self._flight: Flight | None = None
        self._whole = parts.whole
        """The protection can continue from the backup's last epoch, if the backup has an epoch."""
        self._valid = False
        """The lease store has recorded that the standby is valid."""
        self._begun = parts.begun
        """The logs contain all writes since the mirrors started; no write has been consumed."""
        self._held = parts.held
        """Output is buffered until its epoch is committed."""
        self._terms = pacing.PacingTerms(
            interval=session.terms.interval, slowdown=session.terms.slowdown
        )
        self._pace = pacing.initial_pace(self._terms)
        self._again = _AGAIN
        """Delay before reconnecting after a lost connection, while output is not buffered."""
        self._look_at_devices = 0.0
        self._first_copy = FirstCopy(
            monitor=parts.monitor, memory=parts.memory, logs=parts.logs, disks=parts.guest.disks,
            requests=parts.requests, status=parts.status, pause=parts.capturer.pause,
        )  # fmt: skip
        self.standby_ended = False
        """The backup has confirmed the end of the protection: its standby will never run."""
        self._due = self._safe = time.monotonic()
        """`_safe`: when the backup last had everything that released output depends on."""

    def run(self) -> None:
        """Run until the end of the protection is requested.

        Raises Switched after a planned switchover, and VmckptError.
        """
        if not (self._held or self._parts.unprotected):
            self._forgo_standby()
        while not self._parts.requests.has(Request.END):
            try:
                with self._connected() as line:
                    self._serve(line)
            except (ConnectionLost, WireError, LeaseUnreachable, ValueError) as exc:
                self._cut(exc)
            except HypervisorError:
                if not self._held or self._parts.buffers.complete():
                    raise
                self._parts.status.cut("a network card was unplugged")
                self._wait_alone()

    def _forgo_standby(self) -> None:
        """Give up the standby: a filter is gone, and with it the output buffered in the filter.

        The standby must be invalid before the output of any epoch that it lacks is released.
        """
        why = "QEMU's filter that buffered a card's output is gone; the standby must be rebuilt"
        while not self._run_unprotected(why) and not self._parts.requests.has(Request.END):
            self._keep()  # for the remaining filters
            self._parts.requests.wait(_AGAIN)

    def _connected(self) -> PeerConnection:
        status = self._parts.status
        session = self._session
        made = connection.connect(self._folder, (session.address, session.port), limit=_CONNECT)
        lease_holder = self._parts.lease_holder
        # The backup learns new tokens only from the primary's messages. So a message whose token is
        # newer than the primary's is not from the backup, and is rejected.
        line = PeerConnection(
            made, lambda: lease_holder.token, takes=lambda told: told <= lease_holder.token
        )
        status.connected(line)
        return line

    def _cut(self, why: Exception) -> None:
        """Handle a lost connection. Output waits, since part of the epoch may not have arrived."""
        parts = self._parts
        parts.status.cut(str(why))
        parts.lease_holder.line = None
        parts.monitor.run_state()  # raises an error if QEMU is gone
        if self._flight is not None:
            parts.memory.doubt(self._flight.flags)
        if parts.requests.has(Request.PLANNED):
            # The guest may be paused for the switchover; the backup must not run it yet.
            parts.requests.drop(Request.PLANNED)
            parts.guest.resume()
        if self._held:
            # New memory is given to the standby once the agents are connected again.
            if not (self._same_devices() or parts.devices.dimms):
                self._wait_alone()
            self._keep()
        self._state = None
        # There is no need to wait for a standby that was never consistent, if the lease store
        # records it as invalid.
        hold = self._session.terms.hold if self._whole or self._session.lease is None else 0.0
        if not self._held:
            # Without a standby, the guest's writes need not wait for the log to be read.
            parts.mirrors.end()
            self._begun = False
            parts.status.alone(str(why))
        elif time.monotonic() - self._safe > hold:
            self._run_unprotected(str(why))
        parts.requests.wait(_AGAIN if self._held else self._again)

    def _run_unprotected(self, why: str) -> bool:
        """Record the standby as invalid, then run unprotected.

        Returns False if running unprotected is not permitted yet, or if the record fails.
        """
        parts = self._parts
        self._valid = False
        if not parts.leave.has():
            parts.status.say(f"output waits for permission to run unprotected: {why}")
            return False
        try:
            parts.lease_holder.invalidate()
        except VmckptError as exc:
            parts.status.say(f"output waits: the standby cannot be recorded as invalid: {exc}")
            return False
        parts.guest.note_unprotected(True)
        self._let_out()
        parts.mirrors.end()
        self._whole = self._begun = False
        parts.status.alone(why)
        parts.leave.over()  # only now do all records show that the standby is invalid
        return True

    def _let_out(self) -> None:
        """Stop buffering output. From then on, no standby may continue from an earlier epoch."""
        self._parts.buffers.remove(self._parts.devices.gone)
        self._parts.status.let_out(self._parts.buffers.lost)
        self._held = False

    def _serve(self, line: PeerConnection) -> None:
        """Synchronise the backup, then send epochs until the end of the protection is requested.

        Raises ConnectionLost, WireError, and Switched after a planned switchover.
        """
        parts, sender = self._parts, self._brought_up(line)
        while not parts.requests.has(Request.END):
            ready, final = self._wait(line), parts.requests.has(Request.PLANNED)
            if not ready and not (final and self._may_be_stopped()):
                parts.requests.drop(Request.PLANNED)
                continue
            if final:
                parts.guest.note_switchover()
                sender.bandwidth = None  # the guest is paused until everything is sent
            try:
                self._cycle(line, sender, final=final)
            except Resumed as exc:
                self._discard(exc)
                continue
            except _Replugged:
                parts.guest.resume()
                self._abandon_flight()
                self._adapt(line)
                continue
            if final:
                parts.guest.hand_over(line)
                raise Switched
        line.send(End(why="the protection has ended"))
        line.expect(End, _ENDS)
        self.standby_ended = True

    def _brought_up(self, line: PeerConnection) -> Sender:
        """Synchronise the backup, and buffer output from then on. Returns the sender for epochs.

        Raises ConnectionLost, WireError.
        """
        parts = self._parts
        captured = max(1, self._number) if self._whole else 0
        line.send(Hello(session=self._session.session, captured=captured))
        welcome = line.expect(HelloAck, _ANSWER)
        if welcome.session != self._session.session:
            raise ConnectionLost("the backup belongs to another protection of the guest")
        parts.lease_holder.line = line
        self._agree(welcome.committed)
        sender = Sender(line, parts.memory, parts.logs, self._session.terms.bandwidth)
        self._adapt(line, _ANSWER)
        if parts.requests.has(Request.END):
            return sender
        self._arrange(line, parts.memory.blocks, (), _ANSWER)
        parts.status.phase(Phase.COPYING)
        if welcome.committed == 0:
            self._begin_anew()
        with parts.lease_holder.busy():
            parts.memory.track(parts.capturer.pause)
        left = parts.memory.compare(line)
        if welcome.committed == 0:
            self._first_copy.run(line, sender, left)
            while self._adapt(line):
                self._first_copy.memory_passes(sender, left)
        if not self._held:
            parts.buffers.add()
            parts.guest.note_unprotected(False)
            self._held = True
            self._safe = time.monotonic()
        return sender

    def _agree(self, committed: int) -> None:
        """Record which epoch the backup has. This also replaces a lost acknowledgement."""
        if self._flight is not None and committed == self._flight.number:
            self._committed(self._flight)
        self._flight = None
        self._acked = committed
        self._number = max(self._number, committed)
        self._whole = committed > 0

    def _begin_anew(self) -> None:
        """Prepare for a first copy. Until the copy is complete, output is not buffered."""
        self._valid = False
        self._again = Seconds(min(2 * self._again, _RARELY))
        self._parts.lease_holder.invalidate()
        self._parts.guest.note_unprotected(True)
        self._parts.leave.over()
        self._let_out()
        if not self._begun:
            self._parts.mirrors.begin_again()
        self._begun = False

    def _check_disks(self) -> None:
        """Check that all writes of the epoch are in the logs. Raises MirrorEnded."""
        for number, log in enumerate(self._parts.logs):
            mirror_job.begun(self._parts.monitor, mirror_job.name_of(number))
            if (why := log.failed()) is not None:
                raise mirror_job.MirrorEnded(
                    f"the write log of a disk failed: {why}", host=self._session.host
                )

    def _cycle(self, line: PeerConnection, sender: Sender, *, final: bool) -> None:
        """Process one epoch, from its capture to the release of its output.

        `final`: the guest stays paused afterwards, for a switchover. Raises ConnectionLost,
        WireError, Resumed, _Replugged.
        """
        parts = self._parts
        began = time.monotonic()
        with parts.lease_holder.busy():
            self._check_disks()  # with a broken mirror, QEMU's flush would fail in the pause
            epoch = parts.capturer.take(goes_on=not final)
        captured = time.monotonic()
        self._number += 1
        flight = Flight(self._number, epoch, parts.memory.flags(epoch.changed))
        self._flight = flight
        with parts.lease_holder.busy():
            if not parts.devices.still():
                raise _Replugged
        before = line.sent
        sender.memory(flight.number, epoch.changed)
        sender.writes(flight.number, [log.consumed for log in parts.logs], epoch.ends)
        with parts.lease_holder.busy():
            self._check_disks()
        sender.finish(
            flight.number, epoch, self._state, base=self._acked, final=final,
            taken=time.time() - (time.monotonic() - captured),
        )  # fmt: skip
        sent = time.monotonic()
        await_ack(
            line, flight.number, parts.status, patience=self._session.terms.hold,
            meanwhile=self._keep,
        )  # fmt: skip
        self._committed(flight)
        ended = time.monotonic()
        parts.status.epoch(
            flight.number, epoch, size=line.sent - before, busy=Seconds(ended - captured),
            sending=Seconds(sent - captured), lost=parts.buffers.lost,
        )  # fmt: skip
        cycle = Cycle(
            pause=epoch.pause, busy=Seconds(ended - captured), interval=self._pace.interval,
            output_waited=epoch.packets, bytes=Bytes(line.sent - before),
        )  # fmt: skip
        self._pace = pacing.decide(self._pace, cycle, self._terms)
        parts.status.pace(self._pace)
        self._due = began + self._pace.interval

    def _discard(self, why: Resumed) -> None:
        """Discard an inconsistent epoch; the next epoch includes its changes."""
        parts = self._parts
        parts.memory.doubt(parts.memory.flags(cast("Sequence[Changed]", why.found)))
        parts.guest.resume()
        parts.status.say(f"an epoch was discarded and will be captured again: {why.message}")
        self._due = time.monotonic()

    def _committed(self, flight: Flight) -> None:
        """Release the output of an epoch that the backup has, if the lease is still valid."""
        parts = self._parts
        self._flight, self._acked, self._state = None, flight.number, flight.epoch.state
        self._safe, self._again = time.monotonic(), _AGAIN
        for log, end in zip(parts.logs, flight.epoch.ends, strict=True):
            log.consume(end)
        with parts.lease_holder.busy():
            if not (self._valid and parts.lease_holder.validated):
                parts.lease_holder.validate()
                self._whole = self._valid = True
            parts.leave.over()
            parts.lease_holder.check()
            parts.buffers.release()
        parts.status.phase(Phase.PROTECTING)

    def _wait(self, line: PeerConnection) -> bool:
        """Wait until the guest may be paused and the next epoch is due or much data is pending.

        Returns False if a request arrives first. Raises ConnectionLost, WireError.
        """
        parts = self._parts
        while not parts.requests.any:
            left = self._due - time.monotonic()
            with parts.lease_holder.busy():  # a call that hangs here delays output, too
                if (left <= 0 or self._is_full()) and self._may_be_stopped():
                    return True
                same = self._same_devices()
            if not same:
                self._adapt(line)
            self._keep()
            found = line.receive(poll_interval(left))
            if isinstance(found, PeerRefused | End):
                raise ConnectionLost(f"the backup refused to continue: {found.why}")
            if isinstance(found, EpochEnd | Hello):
                raise ConnectionLost("the backup sent an unexpected message")
            if isinstance(found, Heartbeat):
                parts.status.heard(note(found))
        return False

    def _keep(self) -> None:
        """Prevent QEMU's own timer from releasing buffered output."""
        with self._parts.lease_holder.busy():
            self._parts.buffers.keep()

    def _same_devices(self) -> bool:
        """Return whether the guest's devices still match those of the standby.

        Checks every 2 s, and when libvirt reports a change; returns True in between.
        """
        now, devices = time.monotonic(), self._parts.devices
        if now < self._look_at_devices and not devices.told:
            return True
        self._look_at_devices = now + _DEVICES
        return devices.same()

    def _adapt(self, line: PeerConnection, patience: Seconds | None = None) -> bool:
        """Give the standby DIMMs that were plugged into the guest. Returns whether it got any.

        If other devices differ, run unprotected until the protection ends. `patience`: how long to
        wait for the backup; None: as long as output may wait. Raises ConnectionLost, WireError.
        """
        parts = self._parts
        self._look_at_devices = time.monotonic() + _DEVICES
        with parts.lease_holder.busy():
            if parts.devices.same():
                return False
        dimms = parts.devices.dimms
        if not dimms:
            self._wait_alone()
            return False
        try:
            with parts.lease_holder.busy():
                blocks = parts.memory.look()
            self._arrange(line, blocks, dimms, patience or self._session.terms.hold)
            with parts.lease_holder.busy():
                parts.memory.include(parts.capturer.pause)
                parts.devices.accept()
        except (CannotTrack, CannotCapture, OSError) as exc:
            self._wait_alone(f"memory was plugged in: {exc}")
            return False
        names = ", ".join(one.name for one in dimms)
        log.info("memory was plugged in, and the standby has it as well: %s", names)
        return True

    @staticmethod
    def _arrange(
        line: PeerConnection, blocks: Blocks, dimms: Sequence[Dimm], patience: Seconds
    ) -> None:
        """Make the standby have these blocks of memory. Raises ConnectionLost, WireError."""
        line.send(MemoryLayout(data=Layout(blocks=blocks, dimms=tuple(dimms)).to_bytes()))
        line.expect(LayoutAck, patience)

    def _abandon_flight(self) -> None:
        """Discard an epoch that was captured and not sent; the next epoch includes its changes."""
        if self._flight is not None:
            self._parts.memory.doubt(self._flight.flags)
            self._flight = None
        self._due = time.monotonic()

    def _wait_alone(self, what: str = "a device was plugged or unplugged") -> None:
        """Run unprotected until the protection ends: the standby can no longer be used."""
        parts = self._parts
        why = f"{what}: run vmckpt unprotect GUEST, then vmckpt protect GUEST --to HOST"
        parts.status.devices_changed()
        self._until_unplugged()
        self._run_unprotected(why)
        while not parts.requests.has(Request.END):
            parts.requests.drop(Request.PLANNED)  # the guest cannot be switched to this standby
            parts.requests.wait(_AGAIN)
            if self._held:  # running unprotected was not permitted yet
                self._keep()
                self._run_unprotected(why)
            parts.monitor.run_state()

    def _until_unplugged(self) -> None:
        """Wait until the filters of unplugged cards are also gone.

        QEMU may crash when it frees a card while packets in a filter refer to the card. Until the
        filters are gone, the standby must be able to take over.
        """
        parts, give_up = self._parts, time.monotonic() + _UNPLUGS
        while self._held and parts.buffers.hold_any_of(parts.devices.gone):
            if time.monotonic() > give_up:  # the card's host interface was not removed
                return
            time.sleep(_POLL)

    def _is_full(self) -> bool:
        parts = self._parts
        much = any(log.size() - log.consumed > _BUSY_LOG for log in parts.logs)
        return much or parts.buffers.collected() > EARLY

    def _may_be_stopped(self) -> bool:
        """Return whether the guest is running and no other job is migrating or saving it."""
        monitor = self._parts.monitor
        if (state := monitor.run_state()) != "running":
            told = "paused" if state == "paused" else f"not running (QEMU's state: {state})"
            self._parts.status.say(f"no epoch is being captured: the guest is {told}")
            self._due = time.monotonic() + _AGAIN
            return False
        if monitor.ask("query-migrate").get("status") in ACTIVE:
            self._parts.status.say(
                "no epoch is being captured: another job is migrating or saving the guest"
            )
            self._due = time.monotonic() + _AGAIN
            return False
        return True
