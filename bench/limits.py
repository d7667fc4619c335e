"""Measure what the machine can do at most, in the same run as the benchmarks that use it.

python -m bench.limits receive ADDRESS      used by `link` and `round_trip` in a lab host
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zstandard
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from vmckpt_lab import host
from vmckpt_lab.plan import LabPlan

ROOT = Path(__file__).parent.parent
_MIB, _CHUNK = 1 << 20, 256 << 10


def _rate(size: int, work: Callable[[], object], turns: int = 5) -> float:
    """Return bytes per second: the median of some turns, after one that does not count."""
    work()
    took = []
    for _ in range(turns):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return size / statistics.median(took)


def memory_copy(mib: int = 256) -> float:
    """Return the bandwidth of copying memory on one core, in bytes per second."""
    source = np.ones(mib * _MIB // 8, dtype=np.uint64)
    target = np.empty_like(source)
    return _rate(source.nbytes, lambda: np.copyto(target, source))


def disk_write(folder: Path, mib: int = 512) -> float:
    """Return the bandwidth of writing a file and syncing it once, in bytes per second."""
    data, path = os.urandom(_MIB), folder / "limit"

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for _ in range(mib):
                file.write(data)
            os.fdatasync(file.fileno())

    try:
        return _rate(mib * _MIB, write, 3)
    finally:
        path.unlink()


def fsync(folder: Path, writes: int = 200) -> float:
    """Return the median time to write and sync 4 KiB, in seconds."""
    path, took = folder / "limit", []
    with path.open("wb", buffering=0) as file:
        for _ in range(writes):
            began = time.perf_counter()
            file.write(bytes(4096))
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    path.unlink()
    return statistics.median(took)


def sealing(folder: Path) -> float:
    """Return how fast one core compresses and encrypts the files of a directory, in bytes/s.

    zstd level 3 and AES-256-GCM, in chunks of 256 KiB, without those that are zero. The size is
    that of all files without their holes.
    """
    cipher, packer = AESGCM(bytes(32)), zstandard.ZstdCompressor(level=3)
    took, size = 0.0, 0
    for path in sorted(folder.iterdir()):
        size += path.stat().st_blocks * 512
        with path.open("rb") as file:
            while part := file.read(_CHUNK):
                if part.strip(b"\0"):
                    began = time.process_time()
                    cipher.encrypt(os.urandom(12), packer.compress(part), None)
                    took += time.process_time() - began
    return size / took


def start_of_python() -> float:
    """Return the time that `python3 -c pass` takes, in seconds."""
    return 1 / _rate(1, lambda: subprocess.run([sys.executable, "-c", "pass"], check=True))


def link(plan: LabPlan, source: str, target: str, *, mib: int = 128) -> tuple[float, float]:
    """Return a plain socket's bandwidth between two hosts, in bytes per second, and round trip.

    The round trip is the median time until one byte comes back, in seconds.
    """
    address = plan.host(target).address
    other = subprocess.Popen(_inside(plan, target, "receive", address))
    try:
        told = subprocess.run(
            _inside(plan, source, "send", address, str(mib)),
            check=True, capture_output=True, text=True,
        ).stdout.split()  # fmt: skip
        other.wait(30)
    finally:
        other.kill()
        other.wait()
    return float(told[0]), float(told[1])


def _inside(plan: LabPlan, name: str, *words: str) -> list[str]:
    command = (sys.executable, "-m", "bench.plain_socket", *words)
    return host.enter(plan.host(name), "sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), *command)
