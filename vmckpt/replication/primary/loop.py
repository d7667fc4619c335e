"""The primary's loop: epoch after epoch, for as long as the guest is to be protected.

One epoch at a time is captured, sent, committed by the backup, and its output let out; meanwhile
the guest runs in the next one. A connection that breaks does not end the protection: the next epoch
that arrives carries all that the backup lacks.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from vmckpt.capture.memory.page_diff import Flags
from vmckpt.capture.memory.shared_memory import Resumed
from vmckpt.capture.migration_settings import ACTIVE, Commands
from vmckpt.errors import HypervisorError, VmckptError
from vmckpt.lease.connection import LeaseUnreachable
from vmckpt.replication.control_socket import Request, Requests
from vmckpt.replication.dirty_pages.finder import Changed, CompareFinder
from vmckpt.replication.disks import mirror_job
from vmckpt.replication.disks.epoch_log import WriteLog
from vmckpt.replication.disks.resync import Readable
from vmckpt.replication.primary import pacing
from vmckpt.replication.primary.epoch_capture import Capturer, Epoch
from vmckpt.replication.primary.first_copy import FirstCopy
from vmckpt.replication.primary.lease_holder import LeaseHolder
from vmckpt.replication.primary.memory import Memory
from vmckpt.replication.primary.network_buffer import EARLY, Buffers
from vmckpt.replication.primary.pacing import Cycle
from vmckpt.replication.primary.sender import Sender
from vmckpt.replication.primary.solo_permission import SoloPermission
from vmckpt.replication.protocol import connection
from vmckpt.replication.protocol.connection import ConnectionLost, PeerConnection
from vmckpt.replication.protocol.messages import (
    Ack,
    End,
    EpochEnd,
    Heartbeat,
    Hello,
    HelloAck,
    PeerRefused,
    WireError,
)
from vmckpt.replication.session import Session
from vmckpt.replication.status import Phase, PrimaryStatus
from vmckpt.units import MIB, Bytes, Seconds


class Mirrors(Protocol):
    """The jobs that bring the guest's writes to the logs."""

    def begin_again(self) -> None:
        """From now on, each into a log that has nothing else."""

    def end(self) -> None:
        """Bring nothing any more."""


class Devices(Protocol):
    """The guest's devices, beside those of its standby."""

    @property
    def told(self) -> bool:
        """Whether libvirt has reported a change since the last whole look."""

    @property
    def gone(self) -> Collection[str]:
        """Names of devices that were not there any more at the last look."""

    def same(self) -> bool:
        """Compare all that the standby must have, too. New cards have no link then."""

    def still(self) -> bool:
        """The same by names alone, which is quick."""


class ProtectedGuest(Protocol):
    """What the loop has done to the guest, and notes for the agents after this one."""

    def disks(self) -> AbstractContextManager[Sequence[Readable]]:
        """Its disks, to be read while it runs; in the order of the logs."""

    def note_unprotected(self, unprotected: bool) -> None:
        """Note that the standby is worth nothing, or is again."""

    def note_switchover(self) -> None:
        """Note that the guest stands still from now on for a switch."""

    def hand_over(self, line: PeerConnection) -> None:
        """The guest stands still and the backup has all of it: give it away for good."""

    def resume(self) -> None:
        """A switch came to nothing: the guest goes on, if it stands still for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop works with."""

    monitor: Commands
    memory: Memory
    finder: CompareFinder
    capturer: Capturer
    logs: Sequence[WriteLog]
    buffers: Buffers
    lease_holder: LeaseHolder
    requests: Requests
    leave: SoloPermission
    """To go on without the backup."""
    status: PrimaryStatus
    mirrors: Mirrors
    guest: ProtectedGuest
    begun: bool
    """The mirrors have just begun: the backup must begin anew."""
    held: bool
    """An agent before us has put the filters in their place, and output waits."""
    whole: bool
    """A standby that has an epoch may be gone on with."""
    devices: Devices
    unprotected: bool = False
    """It is noted that the standby is worth nothing; see `ProtectedGuest.note_unprotected`."""


_LOOK = Seconds(0.1)


def await_ack(
    line: PeerConnection, number: int, status: PrimaryStatus, *, patience: Seconds,
    meanwhile: Callable[[], None],
) -> None:  # fmt: skip
    """Wait for the acknowledgement as long as the backup takes what was sent, however slowly.

    `meanwhile` is called every now and then. Raises ConnectionLost, WireError, and what it raises.
    """
    taken, since = -1, time.monotonic()
    while True:
        meanwhile()
        found = line.receive(_LOOK)
        if isinstance(found, Ack) and found.epoch == number:
            return
        if isinstance(found, Heartbeat):
            told = note(found)
            status.heard(told)
            much = told.get("received")
            if isinstance(much, int) and taken < much <= line.sent:
                taken, since = much, time.monotonic()
        elif isinstance(found, PeerRefused | End):
            raise ConnectionLost(f"the backup will not go on: {found.why}")
        elif found is not None:
            raise ConnectionLost(f"the backup sends {type(found).__name__}, and no acknowledgement")
        if time.monotonic() - since > patience:
            raise ConnectionLost(f"the backup has taken nothing for {patience:g} s")


def note(beat: Heartbeat) -> Mapping[str, Any]:
    """What the backup tells of itself. Raises ConnectionLost if it makes no sense."""
    try:
        told = json.loads(beat.note or b"{}")
    except (ValueError, RecursionError) as exc:
        raise ConnectionLost(f"the backup's note is no JSON: {exc}") from exc
    if not isinstance(told, dict):
        raise ConnectionLost("the backup's note is no object")
    return told


_CONNECT = Seconds(2.0)
_ANSWER = Seconds(30.0)
_AGAIN = Seconds(0.3)
_RARELY = Seconds(30.0)
"""So long a backup is left in peace which has been copied to in vain, over and over."""
_TURN = Seconds(0.005)
_DEVICES = Seconds(2.0)
_UNPLUGS = Seconds(2.0)
"""libvirt takes a card's other end away this soon after the card."""
_ENDS = Seconds(3.0)
_BUSY_LOG = 16 * MIB
"""So much in a disk's log ends an epoch."""


@dataclass(frozen=True, slots=True)
class Flight:
    """An epoch between its capture and its commit."""

    number: int
    epoch: Epoch
    flags: list[Flags]
    """The pages in it."""


class Switched(Exception):
    """The guest stands still here, and the backup has all of it."""


class _Replugged(Exception):
    """A device was plugged in or out before an epoch was sealed: no standby can go on from it."""


class Primary:
    """Runs until somebody wants no more of it."""

    def __init__(self, session: Session, folder: Path, parts: Parts) -> None:
        self._session, self._folder, self._parts = session, folder, parts
        self._number = 0
        """Of the last epoch captured."""
        self._acked = 0
        self._state: bytes | None = None
        """Device state of the last acknowledged epoch; None: not known what the backup has."""
        self._flight: Flight | None = None
        self._whole = parts.whole
        """The backup's last epoch, if it has one, is something that can be gone on from."""
        self._valid = False
        """The lease knows that the standby is whole."""
        self._begun = parts.begun
        """The mirrors bring all that was written since they began, and nobody has had any of that
        yet."""
        self._held = parts.held
        """Output waits for its epoch."""
        self._terms = pacing.PacingTerms(
            interval=session.terms.interval, slowdown=session.terms.slowdown
        )
        self._pace = pacing.initial_pace(self._terms)
        self._again = _AGAIN
        """So long after a line that broke another is made, while nothing waits for it."""
        self._look_at_devices = 0.0
        self._first_copy = FirstCopy(
            monitor=parts.monitor, finder=parts.finder, logs=parts.logs, disks=parts.guest.disks,
            requests=parts.requests, status=parts.status,
        )  # fmt: skip
        self.standby_ended = False
        """The backup has heard that the protection is over: nobody will run its standby."""
        self._due = self._safe = time.monotonic()
        """`_safe`: when the backup last had all that mattered to those outside."""

    def run(self) -> None:
        """Raises Switched after a planned switch, VmckptError; returns if it shall end."""
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
        """A filter is gone, and with it what it held: before more gets out that the standby has
        not, it must never be let run."""
        why = "a network card's filter is gone: its standby is made anew"
        while not self._run_unprotected(why) and not self._parts.requests.has(Request.END):
            self._keep()  # what is left of the filters
            self._parts.requests.wait(_AGAIN)

    def _connected(self) -> PeerConnection:
        status = self._parts.status
        session = self._session
        made = connection.connect(self._folder, (session.address, session.port), limit=_CONNECT)
        lease_holder = self._parts.lease_holder
        # The backup learns of a newer token by what we send; one newer than ours is no backup's.
        line = PeerConnection(
            made, lambda: lease_holder.token, takes=lambda told: told <= lease_holder.token
        )
        status.connected(line)
        return line

    def _cut(self, why: Exception) -> None:
        """The backup is gone: what was under way is in doubt, and output waits."""
        parts = self._parts
        parts.status.cut(str(why))
        parts.lease_holder.line = None
        parts.monitor.run_state()  # a guest that has ended is told by an error
        if self._flight is not None:
            parts.memory.doubt(self._flight.flags)
        if parts.requests.has(Request.PLANNED):
            # The guest may stand still for it; nobody else may run it yet.
            parts.requests.drop(Request.PLANNED)
            parts.guest.resume()
        if self._held:
            if not self._same_devices():
                self._wait_alone()
            self._keep()
        self._state = None
        # A standby that never was whole is not waited for, if the lease says that it is not.
        hold = self._session.terms.hold if self._whole or self._session.lease is None else 0.0
        if not self._held:
            # It has no standby: no write need wait until the log is read again.
            parts.mirrors.end()
            self._begun = False
            parts.status.alone(str(why))
        elif time.monotonic() - self._safe > hold:
            self._run_unprotected(str(why))
        parts.requests.wait(_AGAIN if self._held else self._again)

    def _run_unprotected(self, why: str) -> bool:
        """Without the backup; never before it is written down that the standby is worth nothing.
        Whether that is so."""
        parts = self._parts
        self._valid = False
        if not parts.leave.has():
            parts.status.say(f"output waits until a controller lets the guest go on alone: {why}")
            return False
        try:
            parts.lease_holder.invalidate()
        except VmckptError as exc:
            parts.status.say(f"output waits: that the standby is behind cannot be noted: {exc}")
            return False
        parts.guest.note_unprotected(True)
        self._let_out()
        parts.mirrors.end()
        self._whole = self._begun = False
        parts.status.alone(why)
        parts.leave.over()  # only now nobody takes the standby for one that is whole
        return True

    def _let_out(self) -> None:
        """Output is held no more: no standby may ever go on from before it."""
        self._parts.buffers.remove(self._parts.devices.gone)
        self._parts.status.let_out(self._parts.buffers.lost)
        self._held = False

    def _serve(self, line: PeerConnection) -> None:
        """Bring the backup up, then one epoch after the other. Raises ConnectionLost, WireError."""
        parts, sender = self._parts, self._brought_up(line)
        while not parts.requests.has(Request.END):
            ready, final = self._wait(line), parts.requests.has(Request.PLANNED)
            if not ready and not (final and self._may_be_stopped()):
                parts.requests.drop(Request.PLANNED)
                continue
            if final:
                parts.guest.note_switchover()
                sender.bandwidth = None  # the guest stands still for it
            try:
                self._cycle(line, sender, final=final)
            except Resumed as exc:
                self._discard(exc)
                continue
            except _Replugged:
                parts.guest.resume()
                self._wait_alone()
                continue
            if final:
                parts.guest.hand_over(line)
                raise Switched
        line.send(End(why="the protection has ended"))
        line.expect(End, _ENDS)
        self.standby_ended = True

    def _brought_up(self, line: PeerConnection) -> Sender:
        """From now on output waits for the backup. Raises ConnectionLost, WireError."""
        parts = self._parts
        captured = max(1, self._number) if self._whole else 0
        line.send(Hello(session=self._session.session, captured=captured))
        welcome = line.expect(HelloAck, _ANSWER)
        if welcome.session != self._session.session:
            raise ConnectionLost("the backup is of another session")
        parts.lease_holder.line = line
        self._agree(welcome.committed)
        with parts.lease_holder.busy():
            same = self._same_devices()
        if not same:
            self._wait_alone()
        parts.status.phase(Phase.COPYING)
        if welcome.committed == 0:
            self._begin_anew()
        left = parts.memory.compare(line)
        limit = self._session.terms.bandwidth
        sender = Sender(line, parts.memory.last, parts.logs, parts.memory.stale, limit)
        if welcome.committed == 0:
            self._first_copy.run(line, sender, left)
        if not self._held:
            parts.buffers.add()
            parts.guest.note_unprotected(False)
            self._held = True
            self._safe = time.monotonic()
        return sender

    def _agree(self, committed: int) -> None:
        """What the backup has. An acknowledgement that was lost is one all the same."""
        if self._flight is not None and committed == self._flight.number:
            self._committed(self._flight)
        self._flight = None
        self._acked = committed
        self._number = max(self._number, committed)
        self._whole = committed > 0

    def _begin_anew(self) -> None:
        """The standby is nothing yet: the guest need not wait for it."""
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
        """Everything that was written until the epoch's end is in the logs. Raises MirrorEnded."""
        for number, log in enumerate(self._parts.logs):
            mirror_job.begun(self._parts.monitor, mirror_job.name_of(number))
            if (why := log.failed()) is not None:
                raise mirror_job.MirrorEnded(f"a disk's log failed: {why}", host=self._session.host)

    def _cycle(self, line: PeerConnection, sender: Sender, *, final: bool) -> None:
        """One epoch, from its capture to the release of its output.

        Raises ConnectionLost, WireError.
        """
        parts = self._parts
        began = time.monotonic()
        with parts.lease_holder.busy():
            self._check_disks()  # else QEMU could not flush them, and would fail in the pause
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
        """An epoch that is not of one moment: what it holds goes with the next one."""
        parts = self._parts
        parts.memory.doubt(parts.memory.flags(cast("Sequence[Changed]", why.found)))
        parts.guest.resume()
        parts.status.say(f"an epoch was discarded and is taken again: {why.message}")
        self._due = time.monotonic()

    def _committed(self, flight: Flight) -> None:
        """The backup has it: its output goes out, if we may speak still."""
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
        """Until the next epoch is due, or too much waits, and the guest may be stopped for it;
        False: something is wished for. Raises ConnectionLost, WireError."""
        parts = self._parts
        while not parts.requests.any:
            left = self._due - time.monotonic()
            with parts.lease_holder.busy():  # what hangs here holds output as an epoch that hangs
                if (left <= 0 or self._is_full()) and self._may_be_stopped():
                    return True
                same = self._same_devices()
            if not same:
                self._wait_alone()
            self._keep()
            found = line.receive(Seconds(min(max(left, _TURN), _TURN)))
            if isinstance(found, PeerRefused | End):
                raise ConnectionLost(f"the backup will not go on: {found.why}")
            if isinstance(found, EpochEnd | Hello):
                raise ConnectionLost("the backup talks nonsense")
            if isinstance(found, Heartbeat):
                parts.status.heard(note(found))
        return False

    def _keep(self) -> None:
        """See that QEMU's own timer lets out nothing that waits."""
        with self._parts.lease_holder.busy():
            self._parts.buffers.keep()

    def _same_devices(self) -> bool:
        """Looked at now and then, and when libvirt reports one. One that was plugged in or out
        makes the standby another machine."""
        now, devices = time.monotonic(), self._parts.devices
        if now < self._look_at_devices and not devices.told:
            return True
        self._look_at_devices = now + _DEVICES
        return devices.same()

    def _wait_alone(self) -> None:
        """Until it is unprotected: nobody can go on from its standby."""
        parts = self._parts
        why = "a device was plugged in or out: unprotect the guest, protect it again"
        parts.status.devices_changed()
        self._until_unplugged()
        self._run_unprotected(why)
        while not parts.requests.has(Request.END):
            parts.requests.drop(Request.PLANNED)  # its standby is no switch's target
            parts.requests.wait(_AGAIN)
            if self._held:  # it may not yet
                self._keep()
                self._run_unprotected(why)
            parts.monitor.run_state()

    def _until_unplugged(self) -> None:
        """QEMU may crash when it frees a card whose packets wait in a filter, which refer to it:
        until the filters are gone, too, the standby must be able to take over."""
        parts, give_up = self._parts, time.monotonic() + _UNPLUGS
        while self._held and parts.buffers.hold_any_of(parts.devices.gone):
            if time.monotonic() > give_up:  # the card's other end was left in its place
                return
            time.sleep(_TURN)

    def _is_full(self) -> bool:
        parts = self._parts
        much = any(log.size() - log.consumed > _BUSY_LOG for log in parts.logs)
        return much or parts.buffers.collected() > EARLY

    def _may_be_stopped(self) -> bool:
        """Whether it runs and nobody else is at work with it."""
        monitor = self._parts.monitor
        if monitor.run_state() != "running":
            self._parts.status.say("the guest stands still: somebody paused it")
            self._due = time.monotonic() + _AGAIN
            return False
        if monitor.ask("query-migrate").get("status") in ACTIVE:
            self._parts.status.say("another job moves or saves the guest")
            self._due = time.monotonic() + _AGAIN
            return False
        return True
