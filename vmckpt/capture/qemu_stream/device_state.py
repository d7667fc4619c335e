"""A guest's device state without its memory, as a stream that a waiting QEMU loads.

QMP `xen-save-devices-state` writes the state of all devices to a file, in any build of QEMU for
x86. It neither starts a migration nor changes a setting. This module completes the stream: the
header in front of it lists the blocks whose pages are added before it is loaded.
"""

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

import numpy as np

from vmckpt.capture.memory.page_diff import Mapping as MappedFile
from vmckpt.capture.migration_settings import Commands
from vmckpt.capture.qemu_stream.header import (
    DESCRIPTION,
    EOF,
    MAGIC,
    PAGE,
    VERSION,
    Head,
    RamBlock,
    parse_head,
)
from vmckpt.capture.qemu_stream.stream import StreamWriter
from vmckpt.errors import CaptureFailed, HypervisorError

_COMMAND = "xen-save-devices-state"
_OURS = "vmckpt"
"""Marks files that belong to vmckpt in QEMU."""
_BEGINNING = MAGIC + struct.pack(">I", VERSION)
# QEMU expects a description after the devices; it does not read it.
_ENDING = struct.pack(">BI", DESCRIPTION, 2) + b"{}"
_MACHINE = "-machine"
# The number of the section "ram" in the header. QEMU compares only its parts with one another.
_SECTION, _RAM_VERSION = 2, 4
_AT_ONCE = 2048
"""Pages that are written at once."""


def is_possible(monitor: Commands) -> bool:
    """Return whether QEMU has the command xen-save-devices-state. Raises HypervisorError."""
    return any(one.get("name") == _COMMAND for one in monitor.ask("query-commands"))


def head_of(monitor: Commands, blocks: Sequence[tuple[str, int]]) -> Head:
    """Return the header for a guest's device state. Raises HypervisorError.

    `blocks`: name and size of each block whose pages are added to the stream.
    """
    machine = str(monitor.ask("qom-get", path="/machine", property="type"))
    return Head(
        machine=machine.removesuffix(_MACHINE), section=_SECTION, instance=0, version=_RAM_VERSION,
        footers=True, blocks=tuple(RamBlock(name, size) for name, size in blocks),
    )  # fmt: skip


class StateFile:
    """A file into which QEMU saves the state of its devices. Use as `with StateFile(…) as file`.

    The file is passed to QEMU before the guest is paused, since each command prolongs the pause.
    """

    def __init__(self, monitor: Commands, head: Head) -> None:
        self._monitor, self._head = monitor, head
        self._number = self._file = -1

    def __enter__(self) -> Self:
        """Pass the file to QEMU. Raises HypervisorError, OSError."""
        # Not a pipe, since QEMU truncates what it opens. QEMU's descriptor must only allow writing.
        self._file = os.memfd_create("vmckpt-devices", os.MFD_CLOEXEC)
        try:
            writing = os.open(f"/proc/self/fd/{self._file}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                told = self._monitor.tell("add-fd", {"opaque": _OURS}, files=(writing,))
            finally:
                os.close(writing)
        except BaseException:
            os.close(self._file)
            raise
        self._number = int(told["fdset-id"])
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        with suppress(HypervisorError):  # a later `clean` removes it
            self._monitor.tell("remove-fd", {"fdset-id": self._number})

    def save(self, *, releases_disks: bool = False) -> None:
        """Save the state of the paused guest's devices. The guest stays paused.

        `releases_disks`: QEMU also releases the locks of its images, so that a QEMU on another host
        can use them; `cont` takes them again. Raises HypervisorError.
        """
        # "live" makes QEMU deactivate its images, as at the end of a migration.
        named = f"/dev/fdset/{self._number}"
        self._monitor.tell(_COMMAND, {"filename": named, "live": releases_disks})

    def state(self) -> bytes:
        """Return what was saved, as a stream without pages. Raises CaptureFailed, OSError."""
        data = os.pread(self._file, os.fstat(self._file).st_size, 0)
        if not data.startswith(_BEGINNING) or data[-1] != EOF:
            raise CaptureFailed(
                f"{self._monitor.name} on {self._monitor.host}: QEMU wrote no complete device state"
            )
        return self._head.written() + data[len(_BEGINNING) :] + _ENDING


def clean(monitor: Commands) -> None:
    """Remove the files that a killed process left in QEMU. Raises HypervisorError."""
    for one in monitor.ask("query-fdsets"):
        if any(file.get("opaque") == _OURS for file in one["fds"]):
            monitor.tell("remove-fd", {"fdset-id": one["fdset-id"]})


def with_pages(state: bytes, blocks: Sequence[MappedFile]) -> bytes:
    """Return a device state with the pages of its blocks, ready to be loaded.

    `blocks`: the content of each block of the header, in its order. Raises StreamDamaged,
    CaptureFailed if the sizes differ.
    """
    head, length = parse_head(state)
    if [one.size for one in blocks] != [one.size for one in head.blocks]:
        raise CaptureFailed("the blocks of the device state are not those of the standby")
    out: list[bytes] = []
    writer = StreamWriter(head, lambda part: out.append(bytes(part)))
    writer.opening()
    for block, mapped in zip(head.blocks, blocks, strict=True):
        for first in range(0, len(mapped.pages), _AT_ONCE):
            pages = mapped.pages[first : first + _AT_ONCE]
            addresses = np.arange(first, first + len(pages), dtype=np.uint64) * np.uint64(PAGE)
            full = pages.any(axis=1)
            writer.pages(block.name, addresses[full], pages[full].view(np.uint8))
            writer.zeros(block.name, addresses[~full])
    writer.closing(memoryview(state)[length:])
    return b"".join(out)
