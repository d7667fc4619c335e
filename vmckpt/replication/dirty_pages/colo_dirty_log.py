"""Epochs by QEMU's own log of changed pages, which takes time with what changed, not with memory.

QEMU's COLO keeps a secondary by checkpoints; we are the secondary, over a pair of sockets, and say
at once that all was loaded. QEMU asks before each checkpoint and waits for our answer while the
guest runs, so the pace is ours. **While it is on, QEMU takes a `migrate` from anybody and is spoilt
by it**: something must keep libvirt from that, which a block job begun at the monitor does not.
Needs KVM, and QEMU before 10; see `select`.
"""

import json
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise

from vmckpt.capture import migration_settings
from vmckpt.capture.memory.memory_files import MemoryFile
from vmckpt.capture.memory.page_diff import Mapping
from vmckpt.capture.memory.pipe_reader import Drain, Tape
from vmckpt.capture.memory.shared_memory import Marks, PausedCapture
from vmckpt.capture.migration_settings import ACTIVE, NO_LIMIT, PIPE, Commands, Undo
from vmckpt.capture.qemu_stream.header import Head, parse_head
from vmckpt.errors import CannotCapture, CaptureFailed, HypervisorError
from vmckpt.replication.dirty_pages.colo_parser import ColoParser, Stage
from vmckpt.replication.dirty_pages.colo_state import Gathered, StateForm, without_description
from vmckpt.replication.primary.epoch_capture import Epoch, Log, Output
from vmckpt.units import Seconds

COLO = "x-colo"
_DELAY = "x-checkpoint-delay"
_DOWNTIME = "downtime-limit"
_ASKS_AFTER_MS = 5
"""So soon after a checkpoint QEMU asks for the next."""
_DOWNTIME_MS = 20
"""The first pass ends when the rest takes so long."""
_PATIENCE = Seconds(10.0)
_FIRST = Seconds(600.0)
_TURN = 0.002
_BUFFER = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What was so before COLO began; to be written down before `DirtyLog.begin`."""

    capabilities: dict[str, bool]
    delay: int
    downtime: int
    bandwidth: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Before":
        """Raises ValueError, TypeError if it is none."""
        return cls(**json.loads(text))


def dirty_log_facts(monitor: Commands) -> Before:
    """Raises CannotCapture if QEMU has no COLO or something else migrates the guest."""
    undo = migration_settings.settings_facts(monitor, want=COLO, runs=None, folder=None)
    told = monitor.ask("query-migrate-parameters")
    return Before(
        capabilities=undo.capabilities, delay=int(told[_DELAY]), downtime=int(told[_DOWNTIME]),
        bandwidth=undo.bandwidth,
    )  # fmt: skip


def leave(monitor: Commands, before: Before) -> None:
    """Put all back, however far it came and whoever died; the guest runs, and may be migrated.

    May be repeated. A guest that somebody paused runs for a moment. Raises HypervisorError,
    CaptureFailed.
    """
    paused = monitor.run_state() == "paused"
    status = monitor.ask("query-migrate").get("status", "none")
    if status == "colo":
        # Without the capability QEMU would refuse; `migrate_cancel` leaves it in COLO for good.
        migration_settings.set_capabilities(monitor, {COLO: True})
        monitor.tell("x-colo-lost-heartbeat", {})
        _wait_for_cleanup(monitor)
    elif status in ACTIVE:
        monitor.tell("migrate_cancel", {})
    migration_settings.wait_for_end(monitor)
    migration_settings.set_capabilities(monitor, before.capabilities)
    _set(monitor, before.delay, before.downtime, before.bandwidth)
    migration_settings.drop_pipe(monitor)
    state = monitor.run_state()
    if paused:
        # QEMU lets the guest run at COLO's end, whoever paused it.
        if state == "running":
            monitor.tell("stop", {})
    elif state in (*migration_settings.STOPPED, "colo") and not monitor.paused_by_user():
        monitor.tell("cont", {})


def _wait_for_cleanup(monitor: Commands) -> None:
    """COLO counts as completed before its thread has let the guest run and ended; a `migrate` in
    between would be refused and spoil QEMU."""
    give_up = time.monotonic() + _PATIENCE
    while any(one["type"] == "migration" for one in monitor.ask("query-yank")):
        if time.monotonic() > give_up:
            raise CaptureFailed(
                f"QEMU of {monitor.name} on {monitor.host} does not leave COLO",
                hint="look at QEMU's log there",
            )
        time.sleep(_TURN)


def _set(monitor: Commands, delay: int, downtime: int, bandwidth: int) -> None:
    told: dict[str, object] = {_DELAY: delay, _DOWNTIME: downtime, "max-bandwidth": bandwidth}
    monitor.tell("migrate-set-parameters", told)


class DirtyLog:
    """Takes one epoch after the other, like `epoch_capture.Capturer`. `begin` first, `end` last."""

    def __init__(
        self, monitor: Commands, undo: Undo, *, files: Sequence[MemoryFile],
        last: Sequence[Mapping], most: int, output: Output, logs: Sequence[Log],
        still: Callable[[bool], None],
    ) -> None:  # fmt: skip
        """`undo`: of a capture without shared memory; `last`: the copies of the files; `most`: so
        many pages of an epoch are kept aside, of more the last copy gets the new content."""
        self._monitor, self._undo = monitor, undo
        self._gathered = Gathered(files, last, most=most)
        self._parser = ColoParser(self._gathered)
        self._output, self._logs, self._still = output, logs, still
        self._form: StateForm | None = None
        self._before: Before | None = None
        self._socket: socket.socket | None = None
        self._buffer = memoryview(bytearray(_BUFFER))
        self._marks: Marks = []

    def begin(self, before: Before) -> Epoch:
        """The first pass over all of memory: an epoch like any other, with what differs from the
        last copies, which have it already. Raises HypervisorError, CaptureFailed; nothing is left
        then. Disk writes are not held back while it lasts."""
        monitor = self._monitor
        self._before = before
        head = self._shared_head()
        ours, theirs = socket.socketpair()
        self._socket = ours
        try:
            with theirs:
                migration_settings.set_capabilities(
                    monitor, {name: not on for name, on in before.capabilities.items()}
                )
                _set(monitor, _ASKS_AFTER_MS, _DOWNTIME_MS, NO_LIMIT)
                monitor.tell("getfd", {"fdname": PIPE}, files=(theirs.fileno(),))
            self._open_logs(True)
            monitor.tell("migrate", {"uri": f"fd:{PIPE}"})
            self._first_pass()
            ends, packets = self._barrier()
            first = self._parser.state
            self._send(self._parser.ready())
            self._mark("cont")
        except BaseException:
            self._give_up()
            raise
        finally:
            self._open_logs(False)
        self._still(False)
        self._form = StateForm(head, self._gathered, first)
        return self._epoch(without_description(first), ends, packets)

    def take(self, *, goes_on: bool = True) -> Epoch:
        """A guest that somebody paused would run after it: look before, as for any capture.

        Raises HypervisorError, CaptureFailed: all is put back then, and the guest runs.
        """
        self._marks = []
        try:
            self._until(Stage.ASKED)
            # Writes under way must end, or the guest could not be stopped.
            self._open_logs(True)
            self._still(True)
            self._mark("begin")
            self._send(self._parser.reply())
            self._until(Stage.MEMORY)
            self._mark("stop")
            self._until(Stage.WHOLE)
            self._mark("device state")
            ends, packets = self._barrier()
            state = self._parser.state
            if goes_on:
                self._send(self._parser.loaded())
            self._mark("cont")
        except BaseException:
            self._give_up()
            raise
        finally:
            self._open_logs(False)
        if goes_on:
            self._still(False)
        return self._epoch(state, ends, packets)

    def go_on(self) -> None:
        """Let a guest that stands still after an epoch go on. Raises CaptureFailed."""
        if self._parser.stage is Stage.WHOLE:
            self._send(self._parser.loaded())
        self._still(False)

    def end(self) -> None:
        """Leave COLO; the guest runs. May be repeated. Raises HypervisorError, CaptureFailed."""
        try:
            if self._before is not None:
                leave(self._monitor, self._before)
                self._before = None
                self._still(False)
        finally:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def _give_up(self) -> None:
        with suppress(HypervisorError, CaptureFailed):
            self.end()

    def _shared_head(self) -> Head:
        """The head of a stream without shared memory, from one short pause."""
        tape = Tape()
        with Drain(tape) as drain:
            standstill = PausedCapture(self._monitor, self._undo, drain)
            try:
                self._open_logs(True)
                drain.hand_over(self._monitor)
                self._still(True)
                standstill.take(_Nothing, lambda mark: mark("output"))
            except BaseException:
                drain.discard()
                with suppress(HypervisorError, CaptureFailed):
                    migration_settings.break_off(self._monitor, self._undo)
                    self._still(False)
                raise
            finally:
                self._open_logs(False)
        self._still(False)
        return parse_head(bytes(tape.data))[0]

    def _first_pass(self) -> None:
        """Take all of memory; the guest stands still at the end."""
        assert self._socket is not None
        reader = _Reader(self._socket, self._parser, self._buffer)
        reader.start()
        try:
            self._wait_for_colo(reader)
        finally:
            reader.over.set()
            reader.join()
        if reader.error is not None:
            raise reader.error
        self._mark("device state")

    def _wait_for_colo(self, reader: "_Reader") -> None:
        monitor = self._monitor
        give_up = time.monotonic() + _FIRST
        while (status := monitor.ask("query-migrate").get("status")) != "colo":
            if status not in ACTIVE or reader.error is not None or time.monotonic() > give_up:
                raise reader.error or CannotCapture(
                    f"QEMU of {monitor.name} on {monitor.host} does not come to COLO: its"
                    f" migration is {status}",
                    hint="use the way that compares memory",
                )
            if not self._marks and monitor.run_state() == "finish-migrate":
                self._still(True)
                self._mark("begin")
            time.sleep(_TURN)
        if not self._marks:
            self._still(True)
            self._mark("begin")

    def _barrier(self) -> tuple[tuple[int, ...], int]:
        """With the guest stopped: where the disks' logs end, and its output set apart."""
        ends = tuple(log.size() for log in self._logs)
        packets = self._output.close_epoch()
        self._mark("output")
        return ends, packets

    def _epoch(self, state: bytes, ends: tuple[int, ...], packets: int) -> Epoch:
        assert self._form is not None
        marks = self._marks
        return Epoch(
            changed=self._gathered.changed(), state=self._form.written(state), ends=ends,
            packets=packets, pause=Seconds(marks[-1][1] - marks[0][1]),
            phases={b[0]: Seconds(b[1] - a[1]) for a, b in pairwise(marks)},
        )  # fmt: skip

    def _until(self, stage: Stage) -> None:
        """Read until it has come so far; beyond `stage` is fine for one that QEMU runs through."""
        passes = (stage,) if stage is not Stage.MEMORY else (stage, Stage.STATE, Stage.WHOLE)
        while self._parser.stage not in passes:
            assert self._socket is not None
            try:
                length = self._socket.recv_into(self._buffer)
            except OSError as exc:
                raise self._failed(str(exc)) from exc
            if not length:
                raise self._failed("QEMU closed its end")
            self._parser.feed(self._buffer[:length])

    def _send(self, message: bytes) -> None:
        assert self._socket is not None
        self._socket.settimeout(_PATIENCE)
        try:
            self._socket.sendall(message)
        except OSError as exc:
            raise self._failed(str(exc)) from exc

    def _failed(self, why: str) -> CaptureFailed:
        return CaptureFailed(
            f"the dirty log of {self._monitor.name} on {self._monitor.host} broke off: {why}",
            hint="look at QEMU's log there; the way that compares memory goes on without it",
        )

    def _open_logs(self, on: bool) -> None:
        for log in self._logs:
            log.set_open(on)

    def _mark(self, step: str) -> None:
        self._marks.append((step, time.monotonic()))


class _Nothing:
    """Looks for no changes."""

    def result(self) -> None:
        return


class _Reader(threading.Thread):
    """Takes the first pass while its end is looked for: QEMU answers nobody until it got rid of
    what it sends. Ends when nothing is left after `over`."""

    def __init__(self, taken: socket.socket, parser: ColoParser, buffer: memoryview) -> None:
        super().__init__(name="dirty-log", daemon=True)
        self._socket, self._parser, self._buffer = taken, parser, buffer
        self.over = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            if not poll.poll(1):
                if self.over.is_set():
                    return
                continue
            length = self._socket.recv_into(self._buffer)
            if not length:
                return
            if self.error is None:
                self._take(self._buffer[:length])

    def _take(self, data: memoryview) -> None:
        """Whatever goes wrong here, QEMU must get rid of its stream."""
        try:
            self._parser.feed(data)
        except Exception as exc:  # noqa: BLE001 - handed to whoever waits
            self.error = exc
