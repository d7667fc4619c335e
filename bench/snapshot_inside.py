"""The part of the snapshot benches that runs next to QEMU on a lab host. Prints JSON.

    python -m bench.snapshot_inside still GUEST TURNS
    python -m bench.snapshot_inside images GUEST FOLDER DISK OUT SECONDS
    python -m bench.snapshot_inside compare MIB TURNS        needs no guest

still: the shortest possible pause: QEMU's commands `stop` and `cont`, with nothing in between.

compare: measures the comparison of memory in a capture and plain reading in turn, on files of
shared memory without holes. Both read the same bytes, those of the memory and of its last copy,
with the same threads, from pages that are already mapped. The plain read computes the maximum of
all words, block by block. This was the fastest known way to read each byte once, faster than a sum
or a copy.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from vmckpt.capture.memory.background_snapshot import Hooks
from vmckpt.capture.memory.image import FrozenImage
from vmckpt.capture.memory.page_diff import Mapping, bring_up
from vmckpt.capture.memory.shared_memory import SharedMemory
from vmckpt.hypervisor.qmp import QmpMonitor

_BLOCK = (1 << 20) // 8
_TASK = 8 * _BLOCK
_WRITTEN = 64
"""Number of pages, all over the memory, that change between two comparisons."""


def _monitor(guest: str) -> QmpMonitor:
    told = subprocess.run(["virsh", "domuuid", guest], check=True, capture_output=True, text=True)
    return QmpMonitor(told.stdout.strip(), host=os.uname().nodename)


def _hooks() -> Hooks:
    return Hooks(note=lambda _: None)


def still(guest: str, turns: int) -> dict[str, Any]:
    """Return the median pause of `stop` and `cont`, in milliseconds."""
    took = []
    with _monitor(guest) as monitor:
        for _ in range(turns):
            began = time.perf_counter()
            monitor.ask("stop")
            monitor.ask("cont")
            took.append(1000 * (time.perf_counter() - began))
            time.sleep(0.1)
    return {"ms": statistics.median(took)}


def images(guest: str, folder: Path, disk: Path, out: Path, seconds: float) -> dict[str, Any]:
    """Write memory and disk at two moments as sparse files, the input of the programs."""
    with _monitor(guest) as monitor, SharedMemory(monitor, folder) as memory:
        for number in (1, 2):
            done = memory.capture(number, _hooks())
            place = out / str(number)
            _copy(done.image, disk, place)
            time.sleep(seconds)
    shutil.rmtree(folder)
    return {}


def _copy(image: FrozenImage, disk: Path, place: Path) -> None:
    sources = [(image.file(number), f"ram-{number}") for number in range(len(image.blocks))]
    for source, name in [*sources, (disk, "disk-vda")]:
        words = ["cp", "--sparse=always", str(source), str(place / name)]
        subprocess.run(words, check=True)


def compare(mib: int, turns: int) -> dict[str, Any]:
    """Measure a comparison and a plain read. Returns the times, bandwidths and median ratios."""
    threads = min(4, os.cpu_count() or 1)
    rng = np.random.default_rng(3)
    with (
        ThreadPoolExecutor(threads) as pool,
        _mapping(mib, rng) as live,
        _mapping(mib, None) as last,
    ):
        live.populate(live.held())
        bring_up(live, last, pool)
        last.populate(last.written)
        found: dict[str, list[tuple[float, float]]] = {"compare": [], "read": []}
        for turn in range(turns + 1):
            live.pages[rng.choice(len(live.pages), _WRITTEN, replace=False), turn % 512] ^= 1
            held = live.held()
            took = {
                "compare": _timed(lambda held=held: bring_up(live, last, pool, expected=held)),
                "read": _timed(lambda: _read(live, last, pool)),
            }
            if turn:
                for name, one in took.items():
                    found[name].append(one)
    told: dict[str, Any] = {"mib": mib, "threads": threads}
    for name, all_ in found.items():
        wall, cpu = ([one[number] for one in all_] for number in (0, 1))
        told[name] = {
            "ms": [one * 1000 for one in wall],
            "cpu_ms": [one * 1000 for one in cpu],
            "gib_s": 2 * mib / 1024 / statistics.median(wall),
        }
    for key in ("ms", "cpu_ms"):
        told[f"share_{key}"] = statistics.median(told["read"][key]) / statistics.median(
            told["compare"][key]
        )
    return told


def _timed(work: Any) -> tuple[float, float]:
    """Return the elapsed time and the CPU time of all threads, in seconds.

    The CPU time varies less on a busy machine.
    """
    began, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - used


def _mapping(mib: int, rng: np.random.Generator | None) -> Mapping:
    file = os.memfd_create("bench")
    os.ftruncate(file, mib << 20)
    for at in range(mib if rng is not None else 0):
        assert rng is not None
        os.pwrite(file, rng.bytes(1 << 20), at << 20)
    made = Mapping(file, mib << 20, write=True)
    os.close(file)
    return made


def _read(live: Mapping, last: Mapping, pool: ThreadPoolExecutor) -> None:
    def part(mapping: Mapping, start: int) -> None:
        words = mapping.pages.reshape(-1)[start : start + _TASK]
        for at in range(0, len(words), _BLOCK):
            words[at : at + _BLOCK].max()

    tasks = [
        pool.submit(part, one, at) for at in range(0, live.size // 8, _TASK) for one in (live, last)
    ]
    for task in tasks:
        task.result()


def main() -> None:
    """Run the command from the command line, and print the results as JSON."""
    what, *words = sys.argv[1:]
    if what == "still":
        told = still(words[0], int(words[1]))
    elif what == "images":
        told = images(words[0], Path(words[1]), Path(words[2]), Path(words[3]), float(words[4]))
    else:
        told = compare(int(words[0]), int(words[1]))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
