"""The part of the replication bench that runs next to QEMU on a lab host. Prints JSON.

    python -m bench.replication_inside GUEST FOLDER TURNS

Captures epochs of an unprotected guest, 100 ms apart, with all parts of an epoch except the disks'
write logs. Epochs alternate between write tracking, comparing the guest's memory, and doing
neither. The guest's output is released at once.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vmckpt.capture import migration_settings, network_hold
from vmckpt.capture.memory import memory_files, ram_blocks
from vmckpt.capture.memory.page_diff import Flags, Numbers
from vmckpt.capture.migration_settings import IGNORE_SHARED
from vmckpt.capture.qemu_stream import device_state
from vmckpt.hypervisor import qemu_user
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.replication.dirty_pages.finder import Changed, Pages
from vmckpt.replication.primary import tracked_memory
from vmckpt.replication.primary.copied_memory import CopiedMemory
from vmckpt.replication.primary.epoch_capture import Capturer, DeviceStateCapturer
from vmckpt.replication.primary.memory import Blocks, Pause, Piece, ProtectedMemory
from vmckpt.replication.primary.network_buffer import Buffers
from vmckpt.replication.primary.tracked_memory import TrackedMemory
from vmckpt.replication.protocol.connection import PeerConnection

_APART = 0.1


class Nothing:
    """A `memory.ProtectedMemory` that finds no changed pages, and takes no time."""

    blocks: Blocks = ()

    def look(self) -> Blocks:
        return ()

    def include(self, _pause: Pause) -> None:
        pass

    def prepare(self) -> None:
        pass

    def begin(self) -> "Future[list[Changed]]":
        found: Future[list[Changed]] = Future()
        found.set_result([])
        return found

    def track(self, _pause: Pause) -> None:
        pass

    def changes(self, _pause: Pause) -> list[Changed]:
        return []

    def pieces(self, _block: int, _changed: Changed) -> Iterator[Piece]:
        return iter(())

    def sent(self, block: int, numbers: Numbers, pages: Pages) -> None:
        pass

    def flags(self, _changed: Sequence[Changed]) -> list[Flags]:
        return []

    def doubt(self, flags: Sequence[Flags]) -> None:
        pass

    def compare(self, _line: PeerConnection) -> int:
        return 0


def nothing(_on: bool) -> None:
    """For `Capturer.still`."""


def send(memory: ProtectedMemory, changed: Sequence[Changed]) -> None:
    """As if all of the epoch was sent."""
    for block, one in enumerate(changed):
        for numbers, pages, _ in memory.pieces(block, one):
            memory.sent(block, numbers, pages)


def pauses(guest: str, folder: Path, turns: int) -> dict[str, Any]:
    """Return the median pause and its parts for each finder of changed pages, in milliseconds."""
    folder.mkdir()
    found: dict[str, list[dict[str, float]]] = {}
    told = subprocess.run(["virsh", "domuuid", guest], check=True, capture_output=True, text=True)
    uuid = told.stdout.strip()
    with QmpMonitor(uuid, host=os.uname().nodename) as monitor, ExitStack() as stack:
        undo = migration_settings.settings_facts(
            monitor, want=IGNORE_SHARED, runs=True, folder=None
        )
        migration_settings.set_bandwidth(monitor, migration_settings.NO_LIMIT)
        stack.callback(migration_settings.break_off, monitor, undo)
        process = stack.enter_context(identity.require(uuid, guest, monitor.host))
        files = memory_files.files(monitor, process)
        found_blocks = ram_blocks.find(monitor, process)
        blocks = tracked_memory.blocks_of(found_blocks, process)
        private = [(one.name, one.range.size) for one in found_blocks.private]
        head = device_state.head_of(monitor, private)
        methods: dict[str, ProtectedMemory] = {
            "write tracking": TrackedMemory(process, lambda: blocks, stack),
            "none": Nothing(),
            "compare": CopiedMemory(lambda: files, folder, stack),
        }
        owner = qemu_user.owner("qemu:///system", "")
        buffers = Buffers(monitor, network_hold.hold_facts(monitor).cards, folder, owner)
        buffers.add()
        stack.callback(buffers.remove)
        for turn in range(turns):
            for name, finder in methods.items():
                capturer = (
                    Capturer(monitor, undo, finder=finder, output=buffers, logs=(), still=nothing)
                    if name == "compare"
                    else DeviceStateCapturer(
                        monitor, undo, head, finder=finder, output=buffers, logs=(), still=nothing
                    )
                )
                finder.track(capturer.pause)
                began = time.monotonic()
                epoch = capturer.take()
                buffers.release()
                send(finder, epoch.changed)
                if turn:  # the first epoch copies all
                    phases = {key: 1e3 * took for key, took in epoch.phases.items()}
                    found.setdefault(name, []).append({"pause": 1e3 * epoch.pause, **phases})
                time.sleep(max(0.0, began + _APART - time.monotonic()))
    return {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in found.items()
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(pauses(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))) + "\n")
