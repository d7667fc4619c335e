"""A primary with a guest that is files, and a backup that does what a test wants of it."""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np

from tests.support.replicas import Ends, GuestDisk, GuestMemory, Qemu, session, two_ends, until
from tests.support.staging import Disk, Ram
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.errors import HypervisorError, LeaseLost, VmckptError
from vmckpt.replication.backup.epoch_stage import Stage
from vmckpt.replication.control_socket import Request, Requests
from vmckpt.replication.disks import mirror_job, resync
from vmckpt.replication.primary import memory as memories
from vmckpt.replication.primary.copied_memory import CopiedMemory
from vmckpt.replication.primary.epoch_capture import Epoch
from vmckpt.replication.primary.loop import Primary
from vmckpt.replication.primary.memory import ProtectedMemory
from vmckpt.replication.primary.parts import Parts
from vmckpt.replication.primary.solo_permission import SoloPermission
from vmckpt.replication.protocol.connection import ConnectionLost, PeerConnection
from vmckpt.replication.protocol.memory_layout import Dimm, Layout
from vmckpt.replication.protocol.messages import (
    Ack,
    DeviceState,
    End,
    EpochEnd,
    Heartbeat,
    Hello,
    HelloAck,
    LayoutAck,
    MemoryLayout,
    Message,
    PageRequest,
    Pages,
    PeerRefused,
    Writes,
)
from vmckpt.replication.session import Session
from vmckpt.replication.status import PrimaryStatus
from vmckpt.units import Seconds

SIZES = (40, 9)
DISK = (5 * 64 << 10) + 512
NEVER = 10**9


class Peer:
    """The backup's end. Events that matter are noted in the order in which they happen."""

    def __init__(self, ends: Ends, folder: Path, events: list[str]) -> None:
        self._ends, self._events = ends, events
        self.memory = [Ram(np.zeros((size, 512), dtype=np.uint64)) for size in SIZES]
        self.disk = Disk(bytearray(DISK))
        self.stage = Stage(folder / "stage", folder / "log", self.memory, [self.disk])
        self.hellos: list[Hello] = []
        self.seals: list[EpochEnd] = []
        self.bulk: list[Message] = []
        self.ends: list[str] = []
        self.lose: set[int] = set()
        """Epochs for which it hangs up and does not commit."""
        self.unheard: set[int] = set()
        """Epochs that it commits, and hangs up before it says so."""
        self.refuses: str | None = None
        self.layouts: list[Layout] = []
        self.has_no_room = False
        """It takes no DIMMs."""
        self.away = False
        """It hangs up, and takes no calls."""
        self.mute = False
        """It commits, and does not say so."""
        self.note = b'{"committed": 1}'
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Peer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()
        self.stage.close()

    def _run(self) -> None:
        while not self._over:
            if self.away:
                self._rest()
            made = self._ends.accept(Seconds(0.02))
            if made is None:
                continue
            with (
                PeerConnection(made, lambda: 1, takes=lambda _: True) as line,
                suppress(ConnectionLost),
            ):
                self._serve(line)
            self.stage.discard()

    def _rest(self) -> None:
        self._ends.close()
        while self.away and not self._over:
            time.sleep(0.002)
        self._ends.listen()

    def _serve(self, line: PeerConnection) -> None:
        while not (self._over or self.away):
            message = line.receive(Seconds(0.01))
            if self.refuses is not None and isinstance(message, Hello):
                line.send(PeerRefused(why=self.refuses))
                return
            if isinstance(message, MemoryLayout):
                goes_on = self._fit(line, message)
            else:
                goes_on = message is None or self._take(line, message)
            if not goes_on:
                return

    def _take(self, line: PeerConnection, message: Message) -> bool:
        """Whether to go on with the line."""
        match message:
            case Hello():
                self.hellos.append(message)
                if message.captured == 0:
                    self.stage.start_over()
                line.send(HelloAck(session=message.session, committed=self.stage.committed))
            case PageRequest(file=file) if file < 0:
                line.send(resync.answer(message, [self.disk]))
            case PageRequest():
                line.send(memories.answer(message, cast("Any", self.memory)))
            case Pages() | Writes() | DeviceState() if message.epoch == 0:
                self.bulk.append(message)
                self.stage.bulk(message)
            case Pages() | Writes() | DeviceState():
                self.stage.take(message)
            case EpochEnd():
                return self._seal(line, message)
            case End():
                self.ends.append(message.why)
                if message.why != "switched":
                    line.send(message)  # it was heard
            case _:
                raise AssertionError(message)
        return True

    def _fit(self, line: PeerConnection, message: MemoryLayout) -> bool:
        layout = Layout.parse(message.data)
        self.layouts.append(layout)
        if self.has_no_room and layout.dimms:
            line.send(PeerRefused(why="it has no room"))
            return False
        known = len(self.memory)
        for _, size in layout.blocks[known:]:
            self.memory.append(Ram(np.zeros((size // PAGE, 512), dtype=np.uint64)))
        if len(self.memory) > known:
            self.stage.use(self.memory)
        line.send(LayoutAck())
        return True

    def _seal(self, line: PeerConnection, seal: EpochEnd) -> bool:
        if seal.epoch in self.lose:
            return False
        self.stage.seal(seal)
        self.stage.apply()
        self.seals.append(seal)
        self._events.append(f"committed {seal.epoch}")
        if seal.epoch in self.unheard:
            return False
        while self.mute and not self._over:
            time.sleep(0.002)
        line.send(Ack(epoch=seal.epoch))
        with suppress(ConnectionLost):  # the last word of the other end may lie there already
            line.send(Heartbeat(sent=time.time(), note=self.note))
        return True


class Capturer:
    """Takes epochs of a guest that is files; what it does meanwhile is `before`."""

    def __init__(self, finder: ProtectedMemory, disk: GuestDisk, events: list[str]) -> None:
        self._finder, self._disk, self._events = finder, disk, events
        self.count = 0
        self.packets = 0
        self.goes_on: list[bool] = []
        self.before: Callable[[int], None] = lambda _: None

    def take(self, *, goes_on: bool = True) -> Epoch:
        self.count += 1
        self.before(self.count)
        self.goes_on.append(goes_on)
        self._events.append("captured")
        self._finder.prepare()
        return Epoch(
            changed=self._finder.begin().result(), state=b"devices %d" % self.count * 9,
            ends=(self._disk.log.size(),), packets=self.packets, pause=Seconds(0.001),
            phases={"stop": Seconds(0.001)},
        )  # fmt: skip

    def pause(self, work: Callable[[], object]) -> None:
        work()


class Held:
    """The guest's output, as far as it is asked for."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self.waiting = self.lost = self.kept = 0
        self.unplugged = False
        """A card, and its filters with it."""
        self.leaves = 0
        """Looks after which the filters of a card that is gone are gone, too."""
        self.asked_for: list[set[str]] = []
        self.discarded: set[str] | None = None

    def add(self) -> None:
        self._events.append("hold")

    def hold_any_of(self, cards: Collection[str]) -> bool:
        self.asked_for.append(set(cards))
        return bool(cards) and len(self.asked_for) < self.leaves

    def remove(self, gone: Collection[str] = ()) -> None:
        self.discarded = set(gone)
        self._events.append("let all out")

    def release(self) -> None:
        if self.unplugged:
            raise HypervisorError("no such object", host="alpha")
        self._events.append("released")

    def complete(self) -> bool:
        return not self.unplugged

    def keep(self) -> None:
        self.kept += 1

    def collected(self) -> int:
        return self.waiting


class Devices:
    """The guest's, beside its standby's."""

    def __init__(self) -> None:
        self.are_same = True
        self.gone: set[str] = set()
        self.dimms: tuple[Dimm, ...] = ()
        """Plugged in since, and nothing else."""
        self.told = False
        """libvirt has reported a change."""
        self.quick_looks = 0
        self.on_look: Callable[[], object] = lambda: None

    def accept(self) -> None:
        self.dimms = ()
        self.are_same = True

    def same(self) -> bool:
        self.on_look()
        self.told = False
        return self.are_same

    def still(self) -> bool:
        self.on_look()
        self.quick_looks += 1
        return self.are_same


class Mirrors:
    """The job of the one disk."""

    def __init__(self, qemu: Qemu, events: list[str]) -> None:
        self._qemu, self._events = qemu, events

    def begin_again(self) -> None:
        self._events.append("mirrored anew")
        self._qemu.mirror(mirror_job.name_of(0))

    def end(self) -> None:
        self._events.append("mirrored no more")
        self._qemu.jobs.clear()


class LeaseHolder:
    """A lease that is had, until a test takes it away."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self.token = 1
        self.line: PeerConnection | None = None
        self.lost = False
        self.unreachable = False
        self.validated = True
        self.at_work = 0

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.at_work += 1
        yield
        self.at_work -= 1

    def check(self) -> None:
        if self.lost:
            raise LeaseLost("another host holds the lease")

    def validate(self) -> None:
        self._events.append("validated")

    def invalidate(self) -> None:
        if self.unreachable:
            raise VmckptError("the witness gave no answer")
        self.token += 1
        self._events.append("invalidated")


class Guest:
    """Notes what is done to it."""

    def __init__(self, events: list[str], disk: GuestDisk) -> None:
        self._events, self._disk = events, disk

    def note_unprotected(self, unprotected: bool) -> None:
        self._events.append("alone" if unprotected else "not alone")

    def note_switchover(self) -> None:
        self._events.append("switching")

    def hand_over(self, line: PeerConnection) -> None:
        self._events.append("given away")
        line.send(End(why="switched"))

    def resume(self) -> None:
        self._events.append("go on")

    @contextmanager
    def disks(self) -> Iterator[list[GuestDisk]]:
        self._events.append("read")
        yield [self._disk]
        self._events.append("read no more")


class World:
    """All of it. `run` has the primary at work in a thread."""

    def __init__(self, ends: Ends, folder: Path, stack: ExitStack, terms: Session) -> None:
        self.events: list[str] = []
        self.folder, self.ends, self.stack = folder, ends, stack
        self.memory = GuestMemory(folder, SIZES, stack)
        self.disk = GuestDisk(folder, 0, DISK, stack)
        self.qemu = Qemu(self.events)
        self.qemu.mirror(mirror_job.name_of(0))
        self.held, self.lease_holder = Held(self.events), LeaseHolder(self.events)
        self.requests, self.status = Requests(), PrimaryStatus()
        self.leave = SoloPermission(needed=terms.needs_leave)
        self.devices = Devices()
        seen = CopiedMemory(lambda: self.memory.files, folder, stack, aside=20)
        self.capturer = Capturer(seen, self.disk, self.events)
        self.parts: dict[str, Any] = {
            "monitor": self.qemu, "memory": seen, "capturer": self.capturer,
            "logs": [self.disk.log], "buffers": self.held, "lease_holder": self.lease_holder,
            "requests": self.requests, "leave": self.leave, "status": self.status, "begun": True,
            "held": False, "whole": False, "mirrors": Mirrors(self.qemu, self.events),
            "guest": Guest(self.events, self.disk), "devices": self.devices,
        }  # fmt: skip
        self._session = terms
        self.peer = stack.enter_context(Peer(ends, folder, self.events))
        self.raised: BaseException | None = None

    def _is_alone(self) -> bool:
        """As an agent before this one has noted it."""
        noted = [event for event in self.events if event in ("alone", "not alone")]
        return noted[-1:] != ["not alone"]

    @contextmanager
    def run(self, **parts: Any) -> Iterator[None]:
        """Protected as long as the block lasts, unless it ends by itself."""
        self.parts["unprotected"] = self._is_alone()
        primary = Primary(self._session, self.ends.primary, Parts(**{**self.parts, **parts}))
        self.primary = primary
        thread = threading.Thread(target=self._run, args=(primary,), daemon=True)
        thread.start()
        try:
            yield
            self.requests.add(Request.END)
        finally:
            self.requests.add(Request.END)
            thread.join(10.0)
            assert not thread.is_alive()

    def _run(self, primary: Primary) -> None:
        try:
            primary.run()
        except BaseException as exc:  # noqa: BLE001 - the test looks at it
            self.raised = exc

    def ended(self) -> BaseException | None:
        """Wait until it has ended by itself, and say why."""
        until(lambda: self.raised is not None)
        return self.raised

    def epochs(self, count: int) -> None:
        """Wait for so many more to be committed and released."""
        wanted = self.events.count("released") + count
        until(lambda: self.events.count("released") >= wanted)

    def follows(self) -> bool:
        """Whether the standby is what the guest is."""
        pages = [one.content.tobytes() for one in self.peer.memory]
        return pages == self.memory.content() and self.peer.disk.content == self.disk.content

    def phase(self) -> str:
        return str(self.status.as_json()["phase"])

    def says(self) -> str:
        """What is in the way."""
        return str(self.status.as_json().get("says"))

    def since(self, event: str) -> list[str]:
        """What happened after the first of these."""
        return self.events[self.events.index(event) + 1 :]


@contextmanager
def world(**terms: Any) -> Iterator[World]:
    with two_ends() as ends, in_folder(ends) as folder, ExitStack() as stack:
        yield World(ends, folder, stack, session(port=ends.port, **terms))


@contextmanager
def in_folder(ends: Ends) -> Iterator[Path]:
    folder = ends.primary.parent / "guest"
    folder.mkdir()
    yield folder
