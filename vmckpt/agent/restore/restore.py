"""Restore a snapshot on this host: its disks, then its memory."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vmckpt.agent import resumed_guest
from vmckpt.agent.orders import RestoreOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.agent.restore import backing_chain, own_macs
from vmckpt.agent.restore.files import Images, SmallFiles
from vmckpt.agent.restore.own_macs import MacResult
from vmckpt.agent.results import RestoreResult
from vmckpt.agent.resumed_guest import Reason, Resumed
from vmckpt.agent.snapshot import parent_state, spool
from vmckpt.capture.qemu_stream import save_image
from vmckpt.capture.qemu_stream.header import parse_head
from vmckpt.capture.qemu_stream.save_image import Fifo
from vmckpt.capture.qemu_stream.stream import Buffer, StreamWriter, starts_as_zeros
from vmckpt.errors import (
    BadInput,
    Cancelled,
    HypervisorError,
    OutcomeUnknown,
    StoreDamaged,
    StoreError,
    StreamDamaged,
    VmckptError,
)
from vmckpt.hypervisor import connection, domains, qmp
from vmckpt.hypervisor.guest_agent import CHANNEL, GuestAgent
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.store import repository, tiered_reader
from vmckpt.store.assemble import Assembly, Piece, Source
from vmckpt.store.chunk_reader import Reader
from vmckpt.store.format import manifest
from vmckpt.store.format.chunk_map import UNIT, Kind
from vmckpt.store.format.private_part import Private, RegionMap
from vmckpt.store.repository import Store
from vmckpt.store.tiered_reader import TieredReader
from vmckpt.units import Seconds

_PAGE = UNIT[Kind.RAM]


class Revival:
    """Writes the guest's saved state for libvirt; starts over for each reader of the FIFO."""

    def __init__(
        self, order: RestoreOrder, private: Private, reader: Reader, channel: ControllerChannel
    ) -> None:
        """`order`: has the guest's definition; `private`: the snapshot's private part.

        Raises StoreDamaged if memory is missing or its header is invalid, and StoreError.
        """
        self.guest, self.xml, self.channel = order.guest, order.xml or "", channel
        self._private, self._reader = private, reader
        try:
            self._head, _ = parse_head(self._part("head") + b"\0")
        except StreamDamaged as exc:
            # The hint of the parser is for a capture.
            raise StoreDamaged(
                f"the snapshot's memory cannot be restored: {exc.message}",
                hint="restore another snapshot",
            ) from exc
        self._tail = self._part("tail")
        regions = {one.name: one for one in private.regions if one.kind is Kind.RAM}
        missing = [one.name for one in self._head.blocks if one.name not in regions]
        if missing:
            raise StoreDamaged(f"the snapshot lacks the memory block {missing[0]!r}")
        self.regions: Sequence[RegionMap] = [regions[one.name] for one in self._head.blocks]
        self._done = 0
        self.trouble: Exception | None = None
        """The error that stopped `fill`; libvirt only reports that the image is too short."""

    def _part(self, name: str) -> bytes:
        part = next((one for one in self._private.facts.stream if one.name == name), None)
        if part is None:
            raise StoreDamaged("the snapshot has no memory")
        chunks = [self._private.chunks[index] for index in part.chunks]
        blob = b"".join(self._reader.read_many(chunks))
        if len(blob) != part.size:
            raise StoreDamaged(
                f'the snapshot\'s migration stream is damaged: part "{name}" has {len(blob)} bytes'
                f" instead of {part.size}"
            )
        return blob

    def fill(self, file: int) -> None:
        """Write the saved state to an open file. Raises OSError, StoreError, Cancelled."""
        try:
            self._fill(file)
        except (StoreError, Cancelled) as exc:
            self.trouble = exc
            raise

    def _fill(self, file: int) -> None:
        def write(data: Buffer) -> None:
            left = memoryview(data).cast("B")
            while left:
                left = left[os.write(file, left) :]

        self._done = 0
        write(save_image.header(self.xml, running=True))
        writer = StreamWriter(self._head, write)
        writer.opening()
        self.write_memory(writer, file)
        writer.closing(self._tail)

    def write_memory(self, writer: StreamWriter, file: int) -> None:
        """Write the content of all blocks; `writer` writes to `file`. Raises as `fill` does."""
        for region in self.regions:
            self.write_region(writer, region)

    def write_region(
        self, writer: StreamWriter, region: RegionMap, start: int = 0, count: int | None = None,
        *, zeros: bool = False,
    ) -> None:  # fmt: skip
        """Write the content of a block, or `count` pages of it. Raises as `fill` does.

        `zeros`: also write pages of zeros in a block that starts as zeros.
        """
        for piece in self.assembly(region).pieces(start, count):
            self._piece(writer, region.name, piece, zeros=zeros)

    def assembly(self, region: RegionMap) -> Assembly:
        """Return the content of a block. Raises StoreDamaged."""
        return Assembly(region.kind, region.size, region.map, self._private.chunks, self._reader)

    def _piece(self, writer: StreamWriter, block: str, piece: Piece, *, zeros: bool) -> None:
        numbers = np.arange(piece.start, piece.start + piece.count, dtype=np.uint64)
        addresses = numbers * np.uint64(_PAGE)
        if piece.data is not None:
            pages = np.frombuffer(piece.data, dtype=np.uint8).reshape(-1, _PAGE)
            writer.pages(block, addresses, pages)
        elif zeros or not starts_as_zeros(block):
            writer.zeros(block, addresses)
        self._done += piece.count * _PAGE
        self.channel.progress(phase="memory", done=self._done, total=self._total)
        if self.channel.stop.is_set():
            raise Cancelled("stopped while reading the guest's memory")

    @property
    def _total(self) -> int:
        return sum(one.size for one in self.regions)


_PATIENCE = Seconds(60.0)
"""How long to wait for a libvirtd that is being restarted."""
_TURN = Seconds(0.5)
_NOT_YET = ("inmigrate",)
_GONE = ("shutdown", "internal-error")


def start(order: RestoreOrder, revival: Revival) -> None:
    """Start the guest from its saved state.

    With `links_down`, the guest stays paused until the links of its cards are down: QEMU takes the
    links' state from the saved state and ignores libvirt's setting. Raises VmckptError if the guest
    did not start or was destroyed, and OutcomeUnknown if this is unknown.
    """
    paused = order.paused or order.links_down
    try:
        with Fifo(order.folder, revival.fill) as path:
            qmp.restore(str(path), revival.xml, paused=paused, host=order.host, uri=order.uri)
    except OutcomeUnknown as exc:
        if not _has_started(order):
            raise revival.trouble or HypervisorError(
                f"{order.host}: the guest was not started: {exc.message}", host=order.host
            ) from exc
    except HypervisorError as exc:
        if revival.trouble is not None:
            raise revival.trouble from exc
        raise
    if order.links_down:
        try:
            _hush(order)
        except HypervisorError:
            # The links may be up, so the guest must be destroyed. Its images must exist until then.
            _end(order)
            raise


def _hush(order: RestoreOrder) -> None:
    with QmpMonitor(order.guest, host=order.host, uri=order.uri) as there:
        for card in there.cards():
            there.tell("set_link", {"name": card, "up": False})
        if not order.paused:
            there.resume()


def _has_started(order: RestoreOrder) -> bool:
    """Return whether the guest was started. Raises OutcomeUnknown if libvirt does not answer."""

    def look(there: QmpMonitor) -> bool | None:
        state = there.run_state()
        return None if state in _NOT_YET else state not in _GONE

    what, why = "it is unknown whether the guest was started", "its memory is still being loaded"
    return _patiently(order, look, gone=False, what=what, why=why)


def _end(order: RestoreOrder) -> None:
    """Destroy the guest. Raises OutcomeUnknown if it may still exist."""

    def end(there: QmpMonitor) -> bool:
        there.end()
        return True

    what = f"guest {order.guest} could not be destroyed, and its links may be up"
    _patiently(order, end, gone=True, what=what, why="")


def _patiently(
    order: RestoreOrder,
    act: Callable[[QmpMonitor], bool | None],
    *,
    gone: bool,
    what: str,
    why: str,
) -> bool:
    """Repeat `act` until it returns a result other than None, and return that result.

    Returns `gone` if the guest does not exist. Raises OutcomeUnknown after a minute. The message
    contains `what` and libvirt's last error, or `why` if libvirt reported no error.
    """
    give_up = time.monotonic() + _PATIENCE
    while time.monotonic() < give_up:
        try:
            with QmpMonitor(order.guest, host=order.host, uri=order.uri) as there:
                told = act(there)
            if told is not None:
                return told
        except HypervisorError as exc:
            if exc.code in connection.NOT_HERE:
                return gone
            why = exc.message
        time.sleep(_TURN)
    raise _unknown(order, what, why)


def _unknown(order: RestoreOrder, what: str, why: str) -> OutcomeUnknown:
    error = OutcomeUnknown(
        f"{order.host}: {what}: {why}; all images stay in place",
        host=order.host, hint="run vmckpt recover once libvirt on the host answers",
    )  # fmt: skip
    error.undone = False
    return error


class RestoreMethod(Protocol):
    """A method of restoring disks and memory: before the guest runs, or lazily."""

    def images(
        self, order: RestoreOrder, private: Private, reader: Source, channel: ControllerChannel
    ) -> Images:
        """Return the object that creates the images. Raises BadInput if it cannot create them."""

    def started_as(self, xml: str) -> str:
        """Return the domain XML of the guest to start, derived from `xml`."""

    def revival(
        self, order: RestoreOrder, private: Private, reader: Reader, channel: ControllerChannel
    ) -> Revival:
        """Return the object that writes the guest's saved state. Raises as `Revival` does."""


class _Written:
    """Writes disks and memory completely before the guest runs."""

    def images(
        self, order: RestoreOrder, private: Private, reader: Source, channel: ControllerChannel
    ) -> Images:
        return Images(order, private, reader, channel)

    def started_as(self, xml: str) -> str:
        return xml

    def revival(
        self, order: RestoreOrder, private: Private, reader: Reader, channel: ControllerChannel
    ) -> Revival:
        return Revival(order, private, reader, channel)


@contextmanager
def opened(order: RestoreOrder) -> Iterator[tuple[Store, Private, TieredReader]]:
    """Open the snapshot of an order. Yields its store, its contents, and a reader of its chunks.

    Raises StoreError, BadInput.
    """
    cache = Path(order.state) / "cache"
    store = repository.opened(order.store, cache=cache)
    trusted = frozenset(bytes.fromhex(one) for one in order.trusted)
    found = manifest.decode(store.manifest(order.snapshot), order.snapshot, trusted)
    key = None if order.data_key is None else bytes.fromhex(order.data_key)
    private, sealing = found.opened(key)
    missing = {one.target for one in private.facts.disks} - set(order.images)
    if missing:
        raise BadInput(f"the controller gave no path for disk {min(missing)} of the snapshot")
    tiers = [store, *tiered_reader.others(order.others, cache)]
    with TieredReader(tiers, sealing) as reader:
        yield store, private, reader


def restore(
    order: RestoreOrder, channel: ControllerChannel, way: RestoreMethod | None = None
) -> dict[str, Any]:
    """Write the disks, then start the guest. Returns a RestoreResult as JSON.

    All new images are complete before existing images are moved aside. Existing images are moved
    back if the guest does not start. Raises VmckptError or OSError after undoing everything. Raises
    OutcomeUnknown if it is unknown whether the guest started; all images then stay in place, for
    recovery.
    """
    began = time.monotonic()
    way = way or _Written()
    with (
        opened(order) as (store, private, reader),
        spool.held(order.folder, patience=Seconds(0.0)),
    ):
        shutil.rmtree(order.folder, ignore_errors=True)  # left by a killed agent
        order.folder.mkdir(mode=0o700)
        try:
            files = SmallFiles(private.files, order.images, order.snapshot, replace=order.replace)
            with way.images(order, private, reader, channel) as images, files:
                backing_chain.check_backing_chain(map(Path, order.images.values()), order.users)
                images.write()
                files.write()
                written = time.monotonic()
                # The existing guest is destroyed only now, so that it keeps running if a disk
                # cannot be written. In a group, no guest is destroyed before all are ready. The
                # second request checks that the controller is still there.
                channel.request("ready")
                channel.request("make way", made=images.marks(), empty=_empty(order))
                images.swap()
                files.swap()
                try:
                    if order.xml is not None:
                        started = replace(order, xml=way.started_as(order.xml))
                        start(started, way.revival(started, private, reader, channel))
                except OutcomeUnknown:
                    images.leave()
                    files.leave()
                    raise
                images.keep()
                files.keep()
                bases, warnings = images.bases, list(images.warnings)
            if order.follows:
                with suppress(OSError):  # on failure, the next snapshot only names another parent
                    parent_state.went_back(order.state, order.guest, order.snapshot)
            # From here on the guest is restored, even if the controller disappears.
            ended = time.monotonic()
            follows = _Followed()
            if order.xml is not None:
                follows = _follow(order, private, channel)
                warnings += follows.warnings
            warnings += tiered_reader.warnings(reader, store)
        finally:
            shutil.rmtree(order.folder, ignore_errors=True)
    return RestoreResult(
        disks=Seconds(written - began), memory=Seconds(ended - written),
        took=Seconds(ended - began), warnings=warnings, links_down=follows.links_down,
        bases=bases, clock_not_set=follows.clock,
    ).as_json()  # fmt: skip


def _empty(order: RestoreOrder) -> list[str]:
    """Return the names of the disks and small files whose paths do not exist yet."""
    return [name for name, path in order.images.items() if not Path(path).exists()]


def tell_guest(order: RestoreOrder, private: Private) -> Resumed:
    """Set the clock of a restored guest and run its hooks, unless it is paused."""
    if order.paused:
        return Resumed(clock="the guest is paused")
    if CHANNEL not in private.facts.domain_xml:
        return Resumed(clock="the guest has no guest agent")
    if not private.facts.agent:
        return Resumed(clock="its guest agent did not answer when the snapshot was taken")
    reason = Reason.RESTORE if order.follows else Reason.FORK
    try:
        with QmpMonitor(order.guest, host=order.host, uri=order.uri) as monitor:
            return resumed_guest.tell(GuestAgent(monitor), reason, monitor.name)
    except HypervisorError as exc:
        return Resumed(clock=exc.message, hooks=exc.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Followed:
    """The result of the steps that follow the start of a guest."""

    links_down: str = ""
    """Why the links are not up although the controller wanted them up; empty: as requested."""
    clock: str = ""
    """Why the guest's clock was not set; empty: it was set."""
    warnings: tuple[str, ...] = ()


def _follow(order: RestoreOrder, private: Private, channel: ControllerChannel) -> _Followed:
    """Set the guest's clock, run its hooks, and then connect it."""
    told = tell_guest(order, private)
    done = _connect(order, private.facts.domain_xml, channel)
    warnings = done.warnings
    if told.hooks:
        why = f"the hooks in {resumed_guest.HOOKS} of the guest may have had no effect"
        warnings = (f"{why}: {told.hooks}", *warnings)
    return replace(done, clock=told.clock, warnings=warnings)


def _connect(order: RestoreOrder, original: str, channel: ControllerChannel) -> _Followed:
    """Give a fork its own MACs, let the controller run its --on-restore command, set links up.

    `original`: the definition in the snapshot.
    """
    macs = own_macs.give_own_macs(order, original) if order.links_down else MacResult()
    kept = () if not macs.kept else (own_macs.kept_macs(order, macs.kept),)
    try:
        told = channel.request("started")
        up = order.links_down and isinstance(told, dict) and bool(told.get("links_up"))
        if up and kept:
            return _Followed(links_down=kept[0])
        # Before the links come up: the warning must not be too late.
        same = tuple(own_macs.same_addresses(order, macs))
        if up:
            with QmpMonitor(order.guest, host=order.host, uri=order.uri) as there:
                domains.up(there)
        return _Followed(warnings=(*kept, *same))
    except HypervisorError as exc:
        return _Followed(links_down=f"the links of the guest's network cards are still down: {exc}")
    except VmckptError:
        return _Followed(warnings=kept)  # the controller is gone, or has no actions to run
