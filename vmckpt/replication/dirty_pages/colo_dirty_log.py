"""Capture epochs with QEMU's own dirty log, in time proportional to the changes, not to memory.

QEMU's COLO sends checkpoints to a secondary. The agent acts as the secondary, over a socket pair,
and immediately reports each checkpoint as loaded. Before each checkpoint, QEMU asks and waits for
the reply while the guest is running, so the agent sets the pace. **While COLO is on, QEMU accepts a
`migrate` from any client and cannot recover from it**: libvirt must be prevented from migrating the
guest, and a block job started over the monitor does not prevent it. This module needs KVM, and QEMU
before 10; see `select`.
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
"""Time after a checkpoint until QEMU asks for the next checkpoint, in milliseconds."""
_DOWNTIME_MS = 20
"""The first pass ends when the rest can be sent in this time, in milliseconds."""
_PATIENCE = Seconds(10.0)
_FIRST = Seconds(600.0)
_TURN = 0.002
_BUFFER = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """QEMU's settings before COLO was started. Store them before calling `DirtyLog.begin`."""

    capabilities: dict[str, bool]
    delay: int
    downtime: int
    bandwidth: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Before":
        """Parse the text of `to_json`. Raises ValueError, TypeError if it is invalid."""
        return cls(**json.loads(text))


def dirty_log_facts(monitor: Commands) -> Before:
    """Read the settings that COLO changes.

    Raises HypervisorError, and CannotCapture if QEMU has no COLO or the guest is being migrated.
    """
    undo = migration_settings.settings_facts(monitor, want=COLO, runs=None, folder=None)
    told = monitor.ask("query-migrate-parameters")
    return Before(
        capabilities=undo.capabilities, delay=int(told[_DELAY]), downtime=int(told[_DOWNTIME]),
        bandwidth=undo.bandwidth,
    )  # fmt: skip


def leave(monitor: Commands, before: Before) -> None:
    """Leave COLO and restore QEMU's settings. Afterwards the guest is running and may be migrated.

    This works from any point at which an agent may have died, and may be repeated. A guest that a
    user paused runs briefly and is paused again. Raises HypervisorError, CaptureFailed.
    """
    paused = monitor.run_state() == "paused"
    status = monitor.ask("query-migrate").get("status", "none")
    if status == "colo":
        # Without the capability, QEMU would refuse the command. After `migrate_cancel`, QEMU would
        # stay in COLO for good.
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
        # At the end of COLO, QEMU resumes the guest even if a user paused it.
        if state == "running":
            monitor.tell("stop", {})
    elif state in (*migration_settings.STOPPED, "colo") and not monitor.paused_by_user():
        monitor.tell("cont", {})


def _wait_for_cleanup(monitor: Commands) -> None:
    """Wait until QEMU's COLO thread has ended. Raises CaptureFailed if it does not end.

    QEMU reports COLO as completed before the thread has resumed the guest and ended. A `migrate` in
    between would be refused, and QEMU would not recover from the attempt.
    """
    give_up = time.monotonic() + _PATIENCE
    while any(one["type"] == "migration" for one in monitor.ask("query-yank")):
        if time.monotonic() > give_up:
            raise CaptureFailed(
                f"QEMU of {monitor.name} on {monitor.host} does not leave COLO",
                hint="see QEMU's log there",
            )
        time.sleep(_TURN)


def _set(monitor: Commands, delay: int, downtime: int, bandwidth: int) -> None:
    told: dict[str, object] = {_DELAY: delay, _DOWNTIME: downtime, "max-bandwidth": bandwidth}
    monitor.tell("migrate-set-parameters", told)


class DirtyLog:
    """Captures one epoch after another, like `epoch_capture.Capturer`.

    First call `begin`, which captures the first epoch, then `take` for each further epoch, and
    finally `end`.
    """

    def __init__(
        self, monitor: Commands, undo: Undo, *, files: Sequence[MemoryFile],
        last: Sequence[Mapping], most: int, output: Output, logs: Sequence[Log],
        still: Callable[[bool], None],
    ) -> None:  # fmt: skip
        """`undo`: undo data of a capture without shared memory; `last`: the last copies of the
        memory files; `most`: maximum number of an epoch's pages to keep aside, beyond which new
        content is written directly to the last copy; `still`: as for `Capturer`.
        """
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
        """Start COLO and return its first pass, which sends all memory, as an epoch.

        The epoch contains the pages that differ from the last copies; their new content is already
        in the last copies. Disk writes do not wait for space in the log during the pass. Raises
        HypervisorError, CaptureFailed; in that case, COLO is left.
        """
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
        """Capture the next epoch. Without `goes_on`, the guest stays paused afterwards.

        A guest that a user paused would be resumed, so check its state first, as for any capture.
        Raises HypervisorError, CaptureFailed; in that case, QEMU's settings are restored and the
        guest is resumed.
        """
        self._marks = []
        try:
            self._until(Stage.ASKED)
            # The guest cannot be stopped until its disk writes in flight are complete.
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
        """Resume a guest that is paused after an epoch. Raises CaptureFailed."""
        if self._parser.stage is Stage.WHOLE:
            self._send(self._parser.loaded())
        self._still(False)

    def end(self) -> None:
        """Leave COLO; the guest is then running. May be repeated.

        Raises HypervisorError, CaptureFailed.
        """
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
        """Return the header of a stream without shared memory. This pauses the guest briefly."""
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
        """Receive all memory; at the end, the guest is paused."""
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
                    f"QEMU of {monitor.name} on {monitor.host} cannot start COLO: its"
                    f" migration is {status}",
                    hint="use the method that compares memory",
                )
            if not self._marks and monitor.run_state() == "finish-migrate":
                self._still(True)
                self._mark("begin")
            time.sleep(_TURN)
        if not self._marks:
            self._still(True)
            self._mark("begin")

    def _barrier(self) -> tuple[tuple[int, ...], int]:
        """Close the epoch for disks and network while the guest is paused.

        Returns the end offset of each disk's log, and the number of packets.
        """
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
        """Read until the parser has reached `stage`. Raises CaptureFailed.

        MEMORY also counts as reached in later stages, since QEMU does not wait in that stage.
        """
        passes = (stage,) if stage is not Stage.MEMORY else (stage, Stage.STATE, Stage.WHOLE)
        while self._parser.stage not in passes:
            assert self._socket is not None
            try:
                length = self._socket.recv_into(self._buffer)
            except OSError as exc:
                raise self._failed(str(exc)) from exc
            if not length:
                raise self._failed("QEMU closed the connection")
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
            f"the dirty log of {self._monitor.name} on {self._monitor.host} failed: {why}",
            hint="see QEMU's log there; the method that compares memory works without COLO",
        )

    def _open_logs(self, on: bool) -> None:
        for log in self._logs:
            log.set_open(on)

    def _mark(self, step: str) -> None:
        self._marks.append((step, time.monotonic()))


class _Nothing:
    """A comparison that finds no changes."""

    def result(self) -> None:
        return


class _Reader(threading.Thread):
    """A thread that receives the first pass while another thread polls the monitor for its end.

    QEMU's monitor does not answer until QEMU has sent its data. The thread ends once `over` is set
    and no data is left to read.
    """

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
        """Parse data. Errors are stored, not raised: QEMU must be able to send its stream."""
        try:
            self._parser.feed(data)
        except Exception as exc:  # noqa: BLE001 - raised in the thread that waits
            self.error = exc
