"""What write tracking costs a guest: protecting all of its memory, or only the written pages.

    python -m bench.write_tracking [--accelerator kvm] [--memory 64 256] [--turns N] [--json FILE]

A scratch guest reads each page of its memory once, and writes every Nth; then it waits. Between two
such passes, the pages that it wrote are protected in one of these ways:

none     not at all
whole    by one call for the whole range
near     by runs, merged if at most 16 pages are between them: what a protection does
exact    by runs, not merged

Printed are the processor time of that call and of the guest's next pass, by how much the pass is
longer than without protection, and the same for each written page. Under KVM, the guest has to map
pages again whose protection has changed.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.scratch_qemu import Scratch
from vmckpt.capture.memory import write_tracking
from vmckpt.capture.memory.page_runs import numbers
from vmckpt.capture.memory.write_tracking import MemoryRange, WriteTracking
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess

_PROGRAM = bytes.fromhex(
    "fa2e660f01167800"  # cli; load the table at 0x78
    "0f20c00c010f22c0"  # protected mode
    "bb08008edb"  # ds = a segment of 4 GiB
    "24fe0f22c031db8edb"  # real mode, whose limit is still 4 GiB; ds = 0
    "f390"  # pause
    "66833e100600"  # dword [0x610], the order to begin,
    "74f6"  # is 0: wait
    "66c706100600000000"  # no order any more
    "66be00001000"  # esi = 1 MiB
    "668b0e1806"  # ecx = dword [0x618], N
    "6689ca"  # edx = ecx
    "67668b06"  # read dword [esi]
    "664a7507"  # edx -= 1; unless it is 0, skip:
    "6766ff06"  # inc dword [esi]
    "6689ca"  # edx = ecx
    "6681c600100000"  # esi += a page
    "663b36140672e3"  # esi < dword [0x614], the end: go on
    "66ff060006"  # inc dword [0x600], the counter
    "ebbb"  # wait again
).ljust(0x68, b"\0") + bytes.fromhex(
    "0000000000000000"  # no segment
    "ffff00000093cf00"  # data, 4 GiB; marked as accessed, since it is in ROM
    "0f0068000f00"  # the table: 16 bytes at 0xf0068
)
_ORDER, _END, _EVERY = 0x610, 0x614, 0x618
_FIRST = 1 << 20
_WAYS = ("none", "whole", "near", "exact")
_MIB = 1 << 20


class Guest:
    """The scratch guest and the tracking of its memory."""

    def __init__(self, guest: Scratch, every: int) -> None:
        self._guest = guest
        self.pages = (guest.size - _FIRST) // 4096 // every
        for at, value in ((_END, guest.size), (_EVERY, every)):
            os.pwrite(guest.file, value.to_bytes(4, "little"), at)

    def go(self) -> float:
        """Return how much processor time of QEMU a pass takes, in milliseconds."""
        # Until the order comes, and after the pass, the guest spins: the wait is short.
        before, clock = self._guest.count(), (~self._guest.pid << 3) | 2  # CPUCLOCK_SCHED
        give_up, began = time.monotonic() + 60, time.clock_gettime(clock)
        os.pwrite(self._guest.file, b"\1", _ORDER)
        while self._guest.count() == before:
            if time.monotonic() > give_up:
                raise SystemExit("the guest does not run: is its accelerator usable?")
            time.sleep(0.00005)
        return 1e3 * (time.clock_gettime(clock) - began)


def mapped(guest: Scratch) -> int:
    """Return the address of the guest's memory in QEMU."""
    maps = Path(f"/proc/{guest.pid}/maps").read_text()
    return next(
        int(line.split("-")[0], 16) for line in maps.splitlines() if "/vmckpt-scratch-" in line
    )


def measure(accelerator: str, size: int, every: int, turns: int) -> list[dict[str, Any]]:
    """Measure all ways in alternating passes."""
    held: dict[str, list[float]] = {way: [] for way in _WAYS}
    passes: dict[str, list[float]] = {way: [] for way in _WAYS}
    with Scratch(accelerator=accelerator, size=size, program=_PROGRAM) as scratch:
        guest = Guest(scratch, every)
        guest.go()
        range_ = MemoryRange(mapped(scratch), size)
        with HeldProcess(scratch.pid) as process, WriteTracking(process, [range_]) as writes:
            writes.collect_all()
            for _ in range(turns):
                for way in _WAYS:
                    guest.go()
                    guest.go()  # with everything mapped again
                    scratch.tell("stop", {})
                    began = time.thread_time()
                    protect(writes, way)
                    held[way].append(1e3 * (time.thread_time() - began))
                    scratch.tell("cont", {})
                    passes[way].append(guest.go())
    usual = statistics.median(passes["none"])
    return [
        {
            "memory_mib": size // _MIB, "written_pages": guest.pages, "protected": way,
            "call_ms": round(statistics.median(held[way]), 3),
            "pass_ms": round(statistics.median(passes[way]), 3),
            "slower_ms": round(statistics.median(passes[way]) - usual, 3),
            "per_written_page_us": round(
                1e3 * (statistics.median(passes[way]) - usual) / guest.pages, 2
            ),
        }
        for way in _WAYS
    ]  # fmt: skip


def protect(writes: WriteTracking, way: str) -> int:
    """Protect the pages that were written. Returns their number."""
    if way == "none":
        return 0
    usual = write_tracking._NEAR, write_tracking._MANY
    if way == "whole":
        write_tracking._MANY = -1
    if way == "exact":
        write_tracking._NEAR, write_tracking._MANY = 0, 1 << 30
    try:
        (found,) = writes.collect_all()
    finally:
        write_tracking._NEAR, write_tracking._MANY = usual
    return len(numbers(found))


def main() -> None:
    """Print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--accelerator", default="kvm", choices=["kvm", "tcg"])
    parser.add_argument("--memory", type=int, nargs="+", default=[64, 256], metavar="MIB")
    parser.add_argument("--every", type=int, nargs="+", default=[1024, 128, 32, 12, 2, 1])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    rows = []
    line = "{:>8} {:>8} {:>7} {:>9} {:>9} {:>10} {:>12}\n"
    sys.stdout.write(
        line.format("MiB", "written", "way", "call ms", "pass ms", "slower ms", "us/written")
    )
    for size in words.memory:
        for every in words.every:
            for row in measure(words.accelerator, size * _MIB, every, words.turns):
                rows.append(row)
                sys.stdout.write(line.format(*row.values()))
                sys.stdout.flush()
    if words.json:
        made = {"accelerator": words.accelerator, "turns": words.turns, "rows": rows}
        words.json.write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
