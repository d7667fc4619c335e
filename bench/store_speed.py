"""Measure how fast a store ingests and restores encrypted chunks, including the sync to disk.

    .venv/bin/python -m bench.store_speed [--mib 512] [--parallel 2] [--folder DIR]
        [--kinds random,memory,text] [--repeat 3] [--profile]

`memory` is half text and half small counters, like the pages of a guest. `text` consists of words
in random order, which compress worse and more slowly than ordinary text. Every figure is the median
of the repeats.
"""

import argparse
import cProfile
import os
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.format.sealing import Encrypted
from vmckpt.store.repository import Store

CHUNK = 256 << 10
_WORDS = 16


def _texts() -> list[bytes]:
    rng = random.Random(1)
    words = [rng.randbytes(rng.randrange(3, 10)).hex().encode() for _ in range(5000)]
    return [b" ".join(rng.choices(words, k=CHUNK // 8))[:CHUNK] for _ in range(_WORDS)]


def chunks(kind: str, count: int) -> list[bytes]:
    """Generate chunks of one kind, all different."""
    if kind == "random":
        return [os.urandom(CHUNK) for _ in range(count)]
    base = _texts()
    made = []
    for number in range(count):
        data = bytearray(base[number % _WORDS])
        data[:8] = number.to_bytes(8, "little")
        if kind == "memory":
            for at in range(4096, CHUNK, 8192):
                data[at : at + 4096] = (number * 64 + at).to_bytes(8, "little") * 512
        made.append(bytes(data))
    return made


def timed(work: Callable[[], object]) -> float:
    """Return how long a function takes, in seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def once(folder: Path, plain: list[bytes], parallel: int) -> dict[str, float]:
    """Measure a new store. Returns the MiB/s of each operation, and the compressed share."""
    sealing = Encrypted(os.urandom(32))
    store = Store.create(LocalFolder(folder))
    mib = sum(len(one) for one in plain) / (1 << 20)
    digests: list[bytes] = []
    size = 0

    def ingest() -> None:
        nonlocal size
        with store.writer(sealing, parallel=parallel) as writer:
            coming = [writer.add(one) for one in plain]
            size = writer.finish().bytes_new
            digests[:] = [one.result() for one in coming]

    def restore() -> None:
        with Store.open(LocalFolder(folder)).reader(sealing, parallel=parallel) as reader:
            for one in reader.read_many(digests):
                len(one)

    os.sync()
    return {
        "ingest": mib / timed(ingest),
        "again": mib / timed(ingest) if plain else 0.0,
        "restore": mib / timed(restore),
        "size": (size or sum(one.size for one in store.backend.keys("packs/"))) / (mib * (1 << 20)),
    }


def main() -> None:
    """Measure the requested kinds, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--kinds", default="random,memory,text")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    print(f"{'':8} {'ingest':>8} {'again':>8} {'restore':>8}  MiB/s {'size':>8}")
    for kind in asked.kinds.split(","):
        plain = chunks(kind, asked.mib * (1 << 20) // CHUNK)
        runs = []
        for _ in range(asked.repeat):
            folder = Path(tempfile.mkdtemp(prefix="vmckpt-bench-", dir=asked.folder))
            profile = cProfile.Profile() if asked.profile else None
            try:
                if profile is None:
                    runs.append(once(folder / "s", plain, asked.parallel))
                else:
                    runs.append(profile.runcall(once, folder / "s", plain, asked.parallel))
                    profile.print_stats("tottime")
            finally:
                shutil.rmtree(folder)
        told = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        print(
            f"{kind:8} {told['ingest']:8.0f} {told['again']:8.0f} {told['restore']:8.0f}"
            f"        {told['size']:8.3f}"
        )
        own = asked.mib
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{'':8} at most {peak:.0f} MiB of memory, of which the input takes {own} MiB")


if __name__ == "__main__":
    main()
