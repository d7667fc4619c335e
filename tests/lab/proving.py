"""The memory ledger of a lab guest that nobody can ask: read out of its memory, from outside.

As prover.c keeps it: pages before its cursor are of a generation, those behind of the one before.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.support.processes import command_lines

Words = NDArray[np.uint64]
_WORDS, _STRIDE = 512, 8
_STEP = np.uint64(0xD6E8FEB86659FD93)
_MOST = 2000
"""Generations that it may have come through."""


@dataclass(frozen=True)
class Region:
    """What was found."""

    pages: int
    broken: int
    """Pages that are of no generation, or of one that they cannot be of."""
    written: int
    """How many pages it has written in all."""


def base(pages: Words, generation: int) -> Words:
    mixed = pages * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= np.uint64((generation + 1) * 0xBF58476D1CE4E5B9 % (1 << 64))
    mixed ^= mixed >> np.uint64(29)
    return mixed * np.uint64(0x94D049BB133111EB)


def pattern(bases: Words, words: Words) -> Words:
    return bases[:, None] + words[None, :] * _STEP


def judge(memory: Words, pages: int) -> Region:
    """`memory`: all of the guest's, in pages; `pages`: how large its region is."""
    every = np.arange(_WORDS, dtype=np.uint64)
    hot, cold = every[every % _STRIDE == 0], every[every % _STRIDE != 0]
    known = base(np.arange(pages, dtype=np.uint64), 0)
    order = np.argsort(known)
    first = memory[:, 1] - _STEP
    place = np.minimum(np.searchsorted(known[order], first), pages - 1)
    found = np.flatnonzero(known[order][place] == first)
    numbers = order[place[found]].astype(np.uint64)
    wrong = (memory[found][:, cold.astype(int)] != pattern(first[found], cold)).any(axis=1)
    begun = memory[found, 0]
    wrong |= (memory[found][:, hot.astype(int)] != pattern(begun, hot)).any(axis=1)
    generation = next(one for one in range(_MOST, -1, -1) if (base(numbers, one) == begun).any())
    newest = base(numbers, generation) == begun
    older = base(numbers, generation - 1) == begun if generation else newest
    cursor = int(newest.sum())
    wrong |= np.where(numbers < cursor, ~newest, ~older)
    return Region(
        pages=len(np.unique(numbers)), broken=int(wrong.sum()),
        written=(generation - 1) * pages + cursor,
    )  # fmt: skip


def read(guest: str, pages: int) -> Region:
    """The same of a guest's QEMU on this machine, by its UUID. It must stand still."""
    # From outside of the guest's host, where libvirt's files are not seen.
    mark = b"\0-uuid\0" + guest.encode() + b"\0"
    process = next(one for one, words in command_lines().items() if mark in words)
    found = []
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        words = line.split(maxsplit=2)
        start, end = (int(word, 16) for word in words[0].split("-"))
        if words[1].startswith("rw-"):  # QEMU's translated code can be executed
            found.append((end - start, start))
    size, start = max(found)
    content, done = bytearray(size), 0
    view = memoryview(content)
    with Path(f"/proc/{process}/mem").open("rb", buffering=0) as file:
        file.seek(start)
        while done < size:
            done += file.readinto(view[done:]) or 0
    return judge(np.frombuffer(content, dtype=np.uint64).reshape(-1, _WORDS), pages)
