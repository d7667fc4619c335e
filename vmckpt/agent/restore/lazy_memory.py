"""Start a guest whose memory is still missing, and hand the missing pages over to a server.

libvirt starts QEMU from a FIFO, as in any restore. The stream in it first contains one page with a
random mark for each large block of memory. Then it pauses: QEMU waits for more, and the marks show
where its blocks are. A userfaultfd is registered for these blocks. Pages that QEMU already has are
sent in the stream, and the page server has the others. Only then does the stream continue with the
state of the devices, whose loading may access memory.
"""

import os
import select
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from xml.etree import ElementTree as ET

import numpy as np

from vmckpt.agent.orders import RestoreOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.agent.restore.page_server import ServedMemory
from vmckpt.agent.restore.restore import Revival
from vmckpt.capture.memory import marked_blocks, outside_writers, page_diff
from vmckpt.capture.memory.marked_blocks import Mark, MarkedBlock
from vmckpt.capture.memory.memory_files import MemoryFile
from vmckpt.capture.memory.missing_pages import MemoryGone, MissingPages
from vmckpt.capture.memory.page_diff import Flags
from vmckpt.capture.memory.process_memory import ProcessMemory
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.capture.qemu_stream.stream import StreamWriter, starts_as_zeros
from vmckpt.errors import Cancelled, QemuUnclear, VmckptError
from vmckpt.hypervisor.qemu_process import identity, userfaultfd
from vmckpt.hypervisor.qemu_process.injection import CannotInject
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.store.chunk_reader import Reader
from vmckpt.store.format.private_part import Private
from vmckpt.units import Seconds

_STARTS = Seconds(20.0)
"""How long to wait for QEMU to read the marks."""
_TURN = 0.003


class CannotServe(VmckptError):
    """The memory cannot be restored lazily. Nothing has changed, and the stream can continue."""

    exit_code = 10


class PageServerClient(Protocol):
    """A connection to the process that serves missing pages."""

    def attach(self, memory: ServedMemory) -> None:
        """Let the process serve the pages from now on. Raises VmckptError."""


def obstacle(xml: str) -> str | None:
    """Return why a guest's memory cannot be restored lazily; None if it can be. Pure."""
    if (why := outside_writers.found(xml)) is not None:
        return why
    if ET.fromstring(xml).find("memoryBacking/hugepages") is not None:
        return "its memory is in huge pages, which cannot be restored lazily"
    return None


class LazyRevival(Revival):
    """Writes the guest's saved state without most of its memory, which a server has."""

    def __init__(
        self, order: RestoreOrder, private: Private, reader: Reader, channel: ControllerChannel,
        server: PageServerClient,
    ) -> None:  # fmt: skip
        """See Revival."""
        super().__init__(order, private, reader, channel)
        self._server = server
        self.why_whole: str | None = None
        """Why the guest did not run before its memory was complete; None: it did."""

    def write_memory(self, writer: StreamWriter, file: int) -> None:
        """See Revival."""
        lazy = [one for one in self.regions if starts_as_zeros(one.name)]
        there: Mapping[str, Flags] = {}
        marks = [Mark(one.name, os.urandom(PAGE), one.size) for one in lazy]
        self.why_whole = obstacle(self.xml)
        if self.why_whole is None:
            for mark in marks:
                page = np.frombuffer(mark.content, dtype=np.uint8).reshape(1, PAGE)
                writer.pages(mark.name, np.zeros(1, dtype=np.uint64), page)
            try:
                there = self._hand_over(file, marks)
            except CannotServe as exc:
                self.why_whole = exc.message
        for region in self.regions:
            if region.name in there:
                for first, end in page_diff.runs(there[region.name]):
                    self.write_region(writer, region, first, end - first, zeros=True)
                continue
            if region in lazy:
                self.write_region(writer, region, 0, 1, zeros=True)  # in place of the mark
            self.write_region(writer, region)

    def _hand_over(self, file: int, marks: Sequence[Mark]) -> Mapping[str, Flags]:
        """Register the marked blocks, and let the server serve them.

        Returns the pages of each block that QEMU already has. Raises CannotServe, Cancelled,
        BrokenPipeError if QEMU does not read the stream.
        """
        process, found = self._find(file, marks)
        with process:
            try:
                number = userfaultfd.create_inside(process)
            except CannotInject as exc:
                raise CannotServe(f"no system call could be made in QEMU: {exc.why.value}") from exc
            except OSError as exc:
                raise CannotServe(f"QEMU cannot create a userfaultfd: {exc.strerror}") from exc
            try:
                there = _registered(process, number, found)
                blocks = {name: (one.range.start, one.range.size) for name, one in found.items()}
                self._server.attach(ServedMemory(pid=process.pid, number=number, blocks=blocks))
            except BaseException as exc:
                # The registration ends: missing pages are zeros, and the stream has them all.
                with suppress(CannotInject, OSError):
                    userfaultfd.close_inside(process, number)
                if isinstance(exc, MemoryGone):
                    raise CannotServe("QEMU has ended, or has unmapped its memory") from exc
                if isinstance(exc, OSError):
                    raise CannotServe(f"its memory cannot be registered: {exc.strerror}") from exc
                raise
        return there

    def _find(
        self, file: int, marks: Sequence[Mark]
    ) -> tuple[HeldProcess, Mapping[str, MarkedBlock]]:
        """Return QEMU's process, and the block with each mark. The caller closes the process.

        `file`: the FIFO that QEMU reads. Raises CannotServe if the blocks are not found, Cancelled,
        BrokenPipeError if QEMU does not read the stream.
        """
        reader = select.poll()
        reader.register(file, select.POLLERR)
        process: HeldProcess | None = None
        give_up = time.monotonic() + _STARTS
        while time.monotonic() < give_up:
            if self.channel.stop.is_set():
                raise Cancelled("stopped while the guest was started")
            if any(event & select.POLLERR for _, event in reader.poll(0)):
                raise BrokenPipeError
            if process is None or not process.lives():
                with suppress(QemuUnclear):
                    process = identity.hold(self.guest)
            if process is not None:
                with suppress(OSError):
                    found = marked_blocks.find(process, marks)
                    if len(found) == len(marks):
                        return process, found
            time.sleep(_TURN)
        if process is not None:
            process.close()
        raise CannotServe("the addresses of its memory in QEMU could not be determined")


def _registered(
    process: HeldProcess, number: int, found: Mapping[str, MarkedBlock]
) -> Mapping[str, Flags]:
    """Register blocks with QEMU's userfaultfd `number`. Returns the pages of each that exist.
    Raises CannotServe, OSError, MemoryGone.
    """
    ranges = [one.range for one in found.values()]
    with MissingPages(process, number, ranges) as pages:
        pages.register()
        memory = ProcessMemory(process, ranges)
        there = {
            name: memory.populated(index, _file(process, block))
            for index, (name, block) in enumerate(found.items())
        }
        for (name, flags), block in zip(there.items(), ranges, strict=True):
            _check_allocation(process, found[name], int(flags.sum()))
            missing = np.flatnonzero(~flags)
            if len(missing):  # try it: some kinds of memory can be registered, but not filled
                pages.fill_zeros(block.start + int(missing[0]) * PAGE, PAGE)
                flags[missing[0]] = True
    return there


def _file(process: HeldProcess, block: MarkedBlock) -> MemoryFile | None:
    """Return the file of shared memory; None if the memory is private. Raises CannotServe."""
    one = block.mapping
    if not one.inode:
        return None
    if not one.shared or one.offset or one.start != block.range.start:
        raise CannotServe("its memory is in a private mapping or in a part of a file")
    path = Path(f"/proc/{process.pid}/map_files/{one.start:x}-{one.end:x}")
    return MemoryFile((), block.range.size, path, process)


def _check_allocation(process: HeldProcess, block: MarkedBlock, known: int) -> None:
    """Raise CannotServe if a file may have more pages than the `known` pages with data.

    Pages that were allocated but never written are not missing, although they are holes for
    lseek(2).
    """
    if (file := _file(process, block)) is None:
        return
    opened = file.open(os.O_RDONLY)
    try:
        allocated = os.fstat(opened).st_blocks * 512 // PAGE
    finally:
        os.close(opened)
    if allocated > known:
        raise CannotServe(
            "its memory was allocated in advance, so QEMU would not report missing pages"
        )
