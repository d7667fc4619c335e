"""Create one snapshot on the guest's host: capture, store, publish.

In a group snapshot each guest waits at a barrier: it is paused, captured, and resumed together with
the others. Output of the guests is buffered from before the first capture until after the last one.
So the captured state of a guest never includes a message that the captured state of the sender has
not sent yet.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from vmckpt.agent.orders import CreateOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.agent.results import CreateResult
from vmckpt.agent.snapshot import describe, memory_methods, spool
from vmckpt.agent.snapshot import parent_state as snapshot_parent_state
from vmckpt.agent.snapshot.choose_method import MemoryMethod
from vmckpt.agent.snapshot.memory_methods import CaptureRequest, Memory
from vmckpt.agent.snapshot.memory_parent import memory_parent
from vmckpt.capture import device_limits, firmware, free_space, network_hold
from vmckpt.capture.disks.live import DiskCapture
from vmckpt.capture.disks.offline import OffDisks
from vmckpt.capture.disks.reader import DiskReader, State
from vmckpt.capture.fs_freeze import FsFreeze
from vmckpt.capture.memory import memory_files, tracker
from vmckpt.capture.memory.background_snapshot import Hooks
from vmckpt.capture.memory.image import FrozenImage
from vmckpt.capture.memory.page_diff import Flags
from vmckpt.capture.migration_settings import Undo
from vmckpt.capture.network_hold import OutputHold
from vmckpt.errors import BadInput, CannotCapture, CaptureFailed, VmckptError
from vmckpt.hypervisor import domain_xml, guest_agent, qemu_user
from vmckpt.hypervisor.backup import Backups
from vmckpt.hypervisor.guest_agent import GuestAgent
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.model.finding import Severity
from vmckpt.model.recovery import Phase
from vmckpt.store import ingest, parent_state, repository
from vmckpt.store.format import manifest
from vmckpt.store.format.chunk_map import UNIT, Extent, Kind, Region, What
from vmckpt.store.format.manifest import Keys, Signer
from vmckpt.store.format.metadata import Part
from vmckpt.store.format.private_part import Private, RegionMap, compacted
from vmckpt.store.ingest import Counts, Ingest, Table
from vmckpt.store.keys import wrapped_keys
from vmckpt.store.pack_writer import Writer, Written
from vmckpt.store.parent_state import Draft
from vmckpt.store.repository import Store
from vmckpt.units import Bytes, Seconds

_PAGE = UNIT[Kind.RAM]
_KINDS = (What.ZEROS, What.DATA, What.SAME, What.UNREAD)
_WHAT = {State.ZEROS: What.ZEROS, State.DATA: What.DATA, State.SAME: What.SAME}


class RamRegion:
    """One block of a memory image. Use as a context manager."""

    kind = Kind.RAM

    def __init__(
        self, image: FrozenImage, number: int, changed: Flags | None = None,
        copied: Flags | None = None,
    ) -> None:  # fmt: skip
        """`changed`: the pages that may differ from the previous snapshot; None: any page may.

        `copied`: the pages that the image contains; None: all. The other pages have not changed.
        Raises CaptureFailed.
        """
        block = image.blocks[number]
        self.name, self.size = block.name, Bytes(block.size)
        self._path: Path = image.file(number)
        # Indices into _KINDS.
        self._codes: NDArray[np.int8] = image.present(number).astype(np.int8)
        if changed is not None:
            self._codes[~changed & (self._codes == 1)] = 2
            if copied is not None:
                self._codes[~copied & (self._codes == 2)] = 3
        self._file = -1

    def __enter__(self) -> "RamRegion":
        self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def extents(self) -> Iterator[Extent]:
        edges = np.flatnonzero(np.diff(self._codes)) + 1
        start = 0
        for end in [*edges.tolist(), len(self._codes)]:
            yield Extent(start, end - start, _KINDS[self._codes[start]])
            start = end

    def read(self, start: int, count: int) -> memoryview:
        data = os.pread(self._file, count * _PAGE, start * _PAGE)
        return memoryview(data.ljust(count * _PAGE, b"\0"))


class DiskRegion:
    """A disk, read from an open libvirt backup or, if the guest is off, from its image."""

    kind = Kind.DISK

    def __init__(self, reader: DiskReader) -> None:
        self.name, self.size = reader.name, reader.size
        self._reader = reader

    def extents(self) -> Iterator[Extent]:
        return (Extent(run.start, run.count, _WHAT[run.state]) for run in self._reader.runs())

    def read(self, start: int, count: int) -> memoryview:
        return self._reader.read(start, count)


# Each limit is longer than the controller waits for the other guests. Output can be buffered for
# longer than the last two limits together.
PATIENCE = {Phase.READY: Seconds(90.0), Phase.STOPPED: Seconds(6.0), Phase.CAPTURED: Seconds(6.0)}


class GroupMember:
    """One guest of a group snapshot. Use as `with GroupMember(monitor, channel) as cut`.

    Leaving the block releases the buffered output.
    """

    def __init__(self, monitor: QmpMonitor, channel: ControllerChannel) -> None:
        """Have the controller record how to undo the buffering.

        Raises CannotCapture if the output cannot be buffered, VmckptError, OSError.
        """
        self._channel = channel
        undo = network_hold.hold_facts(monitor)
        channel.request("intend", step="hold", facts=undo.to_json())
        self._hold = OutputHold(monitor, undo)
        self._ready = self._stood = False
        self.held = Seconds(0.0)
        """How long output was buffered."""

    def __enter__(self) -> Self:
        self._hold.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release the output. Raises CaptureFailed if some of it may still be buffered."""
        self._hold.__exit__(kind, error, trace)

    def hooks(self, own: Hooks) -> Hooks:
        """Return a capture's hooks, extended so that they wait for the other guests."""

        def note(undo: Undo) -> None:
            own.note(undo)
            if self._stood:
                raise CaptureFailed(
                    "the first capture method failed after the other guests of the group had been"
                    " paused"
                )

        def ready() -> None:
            own.ready()
            if not self._ready:
                self._reached(Phase.READY)
                self._ready = True

        def barrier() -> None:
            self._stood = True
            # This guest is paused: its earlier output has been sent, and no guest is captured yet.
            self._hold.begin()
            self._reached(Phase.STOPPED)
            if own.barrier is not None:
                own.barrier()

        def captured() -> None:
            own.captured()
            self._reached(Phase.CAPTURED)
            self.held = self._hold.let_go()

        return replace(
            own, note=note, ready=ready, barrier=barrier, captured=captured,
            given_up=self._hold.drop,
        )  # fmt: skip

    def _reached(self, phase: Phase) -> None:
        """Wait until all guests have reached a phase. Raises VmckptError if one of them has not."""
        self._channel.request("cut", phase=phase, limit=PATIENCE[phase])


Disks = DiskCapture | OffDisks
_STANDS_STILL = Seconds(10.0)
"""Maximum time for which a guest's file systems are frozen."""


def create(order: CreateOrder, channel: ControllerChannel) -> dict[str, Any]:
    """Take a snapshot. Returns a CreateResult as JSON.

    Raises VmckptError or OSError. The guest is then in its previous state, unless the error's
    `undone` is false.
    """
    with (
        spool.held(order.folder, patience=Seconds(0.0)) as lock,
        QmpMonitor(order.guest, host=order.host, uri=order.uri) as monitor,
        ExitStack() as stack,
    ):
        store = repository.opened(order.store, cache=Path(order.state) / "cache")
        return SnapshotCreator(order, channel, store, monitor, lock).run(stack)


@dataclass(frozen=True, slots=True)
class RemoteSigner:
    """Has the controller sign manifests, so that no host can sign what another host wrote."""

    channel: ControllerChannel
    public: bytes

    def sign(self, message: bytes) -> bytes:
        return bytes.fromhex(str(self.channel.request("sign", message=message.hex())))


class SnapshotCreator:
    """Takes one snapshot; call `run` once."""

    def __init__(
        self,
        order: CreateOrder,
        channel: ControllerChannel,
        store: Store,
        monitor: QmpMonitor,
        lock: int,
    ) -> None:
        """`lock`: the snapshot's lock file, which the undo process keeps open while it may have to
        undo the capture. Raises HypervisorError."""
        self._order, self._channel, self._store, self._monitor = order, channel, store, monitor
        self._lock = lock
        self._watch = free_space.Watch(order.folder.parent)
        self._past = parent_state.load(order.line)
        self._off = not monitor.is_active()
        self._described = monitor.xml()
        """The guest's definition, read once, before the guest is paused."""
        self._maps: list[RegionMap] = []
        self._warnings: list[str] = []
        self._files: Mapping[str, bytes] = {}
        self._made_at = 0.0
        self._cut: GroupMember | None = None
        salt = bytes.fromhex(order.salt) if order.salt is not None else None
        signer: Signer = RemoteSigner(channel, bytes.fromhex(order.signer))
        self._keys = Keys(signer, salt, secrets.token_bytes(32) if salt is not None else None)

    def _require_saveable(self) -> None:
        """Raise CannotCapture if QEMU refuses to save the state of one of the guest's devices."""
        refusal = device_limits.unsaved(domain_xml.tree(self._described, "domain"))
        if refusal is not None:
            raise CannotCapture(
                f"{self._monitor.name} {refusal.what}, so QEMU cannot save its state; nothing was"
                " captured",
                hint=f"{refusal.hint}; or capture only the disks with --no-memory",
            )

    def run(self, stack: ExitStack) -> dict[str, Any]:
        order, began = self._order, time.monotonic()
        if order.memory and not self._off:
            self._require_saveable()
        memory_files.sweep()
        tracker.sweep()
        spool.sweep(order.folder.parent)
        with suppress(OSError):
            parent_state.sweep(order.line.parent, now=time.time())
        writer = stack.enter_context(self._store.writer(self._keys.sealing()))
        draft = stack.enter_context(Draft(order.line))
        disks = self._disks()
        stack.enter_context(disks)
        if order.group is not None:
            # Entered last, so that the output is released first, whatever fails.
            self._cut = stack.enter_context(GroupMember(self._monitor, self._channel))
        memory = self._instant(disks, writer, stack)
        table = Table(self._past.chunks if self._past is not None else ())
        work = Ingest(writer, table, stop=self._channel.stop, progress=self._progress)
        stream: tuple[Part, ...] = ()
        if memory is not None:
            try:
                self._memory(memory, work, draft)
                stream = _stream(memory.image, writer, table)
            finally:
                memory.release()
        image = None if memory is None else memory.image
        xml = self._monitor.xml()
        agent = memory is not None and guest_agent.answers(self._monitor, xml)
        described = describe.facts(xml, disks.facts, image, agent=agent)
        self._read(disks, work, draft)
        written = writer.finish()
        warnings = describe.warnings(self._warnings)
        facts = replace(described, stream=stream, warnings=warnings)
        private = compacted(
            Private(
                facts=facts, chunks=table.digests(), regions=tuple(self._maps), files=self._files
            )
        )
        self._publish(private, written, writer)
        self._afterwards(lambda: self._keep(draft, private, disks, memory), stack.close)
        return CreateResult(
            **describe.way(memory, off=self._off),
            held=None if self._cut is None else self._cut.held,
            took=Seconds(time.monotonic() - began),
            read=Bytes(work.counts.read), zero=Bytes(work.counts.zero),
            same=Bytes(work.counts.same), written=written.bytes_new, warnings=self._warnings,
        ).as_json()  # fmt: skip

    def _disks(self) -> Disks:
        order, folder = self._order, self._scratch
        if self._off:  # no QEMU needs access
            folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        else:
            qemu_user.make_folder(folder, qemu_user.owner(order.uri, order.host))
        kind: type[OffDisks] | type[DiskCapture] = OffDisks if self._off else DiskCapture
        return kind(
            Backups(self._monitor),
            guest=order.guest,
            host=order.host,
            snapshot=order.snapshot,
            folder=folder,
        )

    @property
    def _scratch(self) -> Path:
        """Directory for the old data of blocks that the guest overwrites during the backup."""
        return Path(self._order.state) / "scratch"

    def _instant(self, disks: Disks, writer: Writer, stack: ExitStack) -> Memory | None:
        """Capture the complete state of the guest at one instant.

        Returns the memory; None if the snapshot contains no memory. Raises VmckptError, OSError.
        """
        undo = disks.prepare(snapshot_parent_state.parent(self._past), self._others())
        assert disks.plan is not None
        if disks.plan.captured:
            if not self._off:
                free_space.require_space(self._scratch, Bytes(0))
            self._intend("backup", undo.to_json())
            disks.make_room()
        if self._order.memory:
            memory = self._capture(disks, writer, stack)
            self._warnings += memory.warnings
            return memory
        if not disks.plan.captured:
            raise BadInput(
                f"{self._monitor.name} on {self._order.host} has no disk that can be captured",
                hint="to capture its memory, omit --no-memory, and start the guest if it is off",
            )
        if self._off:
            self._taken(disks)
            if self._monitor.saved():
                self._warnings.append(
                    "the guest's saved memory (managed save) is not in the snapshot"
                )
            return None
        with FsFreeze(
            GuestAgent(self._monitor),
            guest=self._order.guest,
            limit=_STANDS_STILL,
            note=lambda facts: self._intend("freeze", facts.to_json()),
        ) as quiet:
            self._taken(disks)
            quiet.release()
        found = quiet.finding(self._monitor.name)
        if found is not None:
            self._warnings.append(found.text)
        return None

    def _taken(self, disks: Disks) -> None:
        """Capture disks and small files at this instant. Called again if an attempt failed."""
        self._made_at = time.time()
        if disks.disks:
            disks.restart()
        disks.freeze_point()
        order = self._order
        self._files = firmware.read(self._described, order.guest, order.host)

    def _intend(self, step: str, facts: str) -> None:
        """Have the controller record a step before it is taken.

        `facts`: what undoing it requires, as JSON.
        """
        self._channel.request("intend", step=step, facts=facts)

    def _capture(self, disks: Disks, writer: Writer, stack: ExitStack) -> Memory:
        order = self._order
        assert disks.plan is not None
        beside = disks.plan.captured or firmware.there(self._described, order.guest)

        def captured() -> None:
            self._made_at = time.time()

        hooks = Hooks(
            note=lambda undo: self._intend("capture", undo.to_json()),
            barrier=(lambda: self._taken(disks)) if beside else None,
            captured=captured,
            progress=self._captured_so_far,
            held=(self._lock,),
        )
        wanted = CaptureRequest(
            way=MemoryMethod(order.way), folder=order.folder, number=secrets.randbits(62),
            parent=memory_parent(self._past, writer.has),
        )  # fmt: skip
        if self._cut is not None:
            hooks = self._cut.hooks(hooks)
        return memory_methods.capture(self._monitor, wanted, hooks, self._channel.stop, stack)

    def _captured_so_far(self, done: int, total: int) -> None:
        self._channel.progress(phase="capture", done=done, total=total)
        self._watch.look()

    def _others(self) -> list[str]:
        """Return the latest snapshots of the guest in other stores, whose checkpoints must stay."""
        return snapshot_parent_state.others(self._order.line, self._order.guest)

    def _memory(self, memory: Memory, work: Ingest, draft: Draft) -> None:
        changed = memory.changed if snapshot_parent_state.unchanged(self._past, memory) else None
        for number, block in enumerate(memory.image.blocks):
            known = None if changed is None else changed.get(block.name)
            copied = None if memory.copied is None else memory.copied[block.name]
            with RamRegion(memory.image, number, known, copied) as region:
                self._region(region, work, draft)

    def _read(self, disks: Disks, work: Ingest, draft: Draft) -> None:
        for disk in disks.disks:
            with disks.reader(disk) as reader:
                self._region(DiskRegion(reader), work, draft)
        disks.end()
        assert disks.plan is not None
        self._warnings += [
            one.text if one.hint is None else f"{one.text}; {one.hint}"
            for one in disks.plan.findings(self._monitor.name)
            if one.severity is not Severity.INFO
        ]

    def _region(self, region: Region, work: Ingest, draft: Draft) -> None:
        past = self._past.regions.get(region.name) if self._past is not None else None
        prints = None
        if region.kind is Kind.RAM:
            prints = draft.prints(region.name, region.kind, region.size)
        map_ = work.region(region, past, prints, draft.map(region.kind, region.size))
        self._maps.append(RegionMap(name=region.name, kind=region.kind, size=region.size, map=map_))

    def _progress(self, counts: Counts) -> None:
        self._channel.progress(phase="store", done=counts.read + counts.same, new=counts.new)
        self._watch.look()

    def _publish(self, private: Private, written: Written, writer: Writer) -> None:
        order = self._order
        public = describe.public(
            order,
            private,
            made_at=self._made_at,
            qemu=self._monitor.qemu_version(),
            parent=snapshot_parent_state.before(self._past),
            epoch=self._epoch,
            new=written.bytes_new,
        )
        wrapped = None
        if self._keys.data_key is not None:
            admins = [bytes.fromhex(one) for one in order.admins]
            wrapped = wrapped_keys.wrap(self._keys.data_key, order.snapshot, admins)
        encoded = manifest.encode(public, private, self._keys)
        self._store.publish(order.snapshot, encoded, wrapped, writer=writer)

    def _afterwards(self, *acts: Callable[[], object]) -> None:
        """Run `acts` after the snapshot is stored.

        If one of them fails, only the next snapshot becomes slower. Raises VmckptError if the
        failure leaves the guest changed.
        """
        for act in acts:
            try:
                act()
            except (OSError, VmckptError) as exc:
                # An error that leaves the guest changed must reach the controller.
                if isinstance(exc, VmckptError) and not exc.undone:
                    raise
                self._warnings.append(f"the next snapshot may need a full read: {exc}")

    @property
    def _epoch(self) -> int:
        return int(self._past.extra.get("epoch", 0)) + 1 if self._past is not None else 0

    def _keep(self, draft: Draft, private: Private, disks: Disks, memory: Memory | None) -> None:
        """Keep the parent state that makes the next snapshot small."""
        checkpoint: str | None = self._order.snapshot
        if self._off:
            checkpoint = (
                None if self._past is None else snapshot_parent_state.checkpoint(self._past)
            )
        end = snapshot_parent_state.End(
            snapshot=self._order.snapshot,
            epoch=self._epoch,
            made_at=int(self._made_at),
            checkpoint=checkpoint,
            memory=memory,
            sources={one.name: one.source for one in disks.facts if one.source is not None},
        )
        snapshot_parent_state.keep(draft, private, self._past, end)
        disks.keep_bitmap(self._others())


def _stream(image: FrozenImage, writer: Writer, table: Table) -> tuple[Part, ...]:
    """Store the parts of QEMU's stream that are not memory, as chunks. Returns these parts."""
    parts = {"head": image.head_bytes, "tail": image.tail()}
    return tuple(
        Part(name=name, size=len(blob), chunks=tuple(ingest.stored(writer, table, blob)))
        for name, blob in parts.items()
    )
