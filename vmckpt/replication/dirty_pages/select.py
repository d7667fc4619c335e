"""Which way to find changed pages works on a host: tried on a scratch guest, and remembered.

QEMU's dirty log needs KVM: under TCG its COLO waits after a few checkpoints for a lock for good.
QEMU 10 leaves COLO's way when it should come to it. Neither is believed without having been tried.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from vmckpt.capture import migration_settings
from vmckpt.capture.memory.page_diff import Mapping
from vmckpt.errors import VmckptError
from vmckpt.replication.dirty_pages import colo_dirty_log, scratch_qemu
from vmckpt.replication.dirty_pages.colo_dirty_log import DirtyLog
from vmckpt.replication.dirty_pages.finder import Pages
from vmckpt.replication.dirty_pages.scratch_qemu import Scratch
from vmckpt.replication.primary.epoch_capture import Epoch

CHECKPOINTS = 20
_APART = 0.01
_FILE = "finder.json"


class Finder(StrEnum):
    """Ways to find changed pages."""

    COMPARE = "compare"
    DIRTY_LOG = "dirty-log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is used, with the reason in words."""

    finder: Finder
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What came of the try."""

    checkpoints: int
    """So many were right."""
    broke: str = ""
    """What went wrong; empty: nothing, and the guest ran and could be migrated in the end."""


def decide(accelerator: str, *, guarded: bool, tried: Tried | None) -> Choice | None:
    """None: it must be tried first. Pure.

    `guarded`: libvirt is kept from migrating or saving the guest, which COLO does not survive: QEMU
    does not refuse it, and can be neither migrated nor brought out of COLO after it. Our mirrors
    keep it from nothing.
    """
    if accelerator != "kvm":
        why = f"QEMU's dirty log cannot be had under {accelerator}, only under kvm"
        return Choice(finder=Finder.COMPARE, why=why)
    if not guarded:
        why = "nothing keeps others from saving or migrating the guest meanwhile"
        return Choice(finder=Finder.COMPARE, why=why)
    if tried is None:
        return None
    if tried.broke:
        why = f"QEMU's dirty log failed on a scratch guest: {tried.broke}"
        return Choice(finder=Finder.COMPARE, why=why)
    if tried.checkpoints < CHECKPOINTS:
        why = f"QEMU's dirty log was right {tried.checkpoints} times only on a scratch guest"
        return Choice(finder=Finder.COMPARE, why=why)
    why = f"QEMU's dirty log was right {tried.checkpoints} times on a scratch guest"
    return Choice(finder=Finder.DIRTY_LOG, why=why)


def choose(
    folder: Path, *, qemu: str, accelerator: str, guarded: bool, trying: Callable[[], Tried]
) -> Choice:
    """`folder`: where it is remembered by QEMU's version and accelerator. Raises OSError.

    `trying` is called when nothing else decides and nothing is remembered: `lambda: tryout()`.
    """
    found = decide(accelerator, guarded=guarded, tried=None)
    if found is None:
        tried = recall(folder, qemu, accelerator)
        if tried is None:
            tried = trying()
            remember(folder, qemu, accelerator, tried)
        found = decide(accelerator, guarded=guarded, tried=tried)
    assert found is not None
    return found


def recall(folder: Path, qemu: str, accelerator: str) -> Tried | None:
    """What is remembered; None: nothing that makes sense."""
    found = _told(folder).get(_key(qemu, accelerator))
    match found:
        case {"checkpoints": int(checkpoints), "broke": str(broke)}:
            return Tried(checkpoints=checkpoints, broke=broke)
        case _:
            return None


def remember(folder: Path, qemu: str, accelerator: str, tried: Tried) -> None:
    """Raises OSError."""
    told = _told(folder) | {_key(qemu, accelerator): asdict(tried)}
    new = folder / f"{_FILE}.{os.getpid()}"
    new.write_text(json.dumps(told))
    new.replace(folder / _FILE)


def _key(qemu: str, accelerator: str) -> str:
    return f"{qemu} {accelerator}"


def _told(folder: Path) -> dict[str, object]:
    with suppress(OSError, ValueError, RecursionError):
        told = json.loads((folder / _FILE).read_text())
        if isinstance(told, dict):
            return told
    return {}


def tryout(*, qemu: str = scratch_qemu.QEMU, accelerator: str = "kvm") -> Tried:
    """Take epochs of a scratch guest and compare each with its memory: half a second, or up to half
    a minute where it hangs."""
    right = 0
    try:
        with ExitStack() as stack:
            guest = stack.enter_context(Scratch(qemu=qemu, accelerator=accelerator))
            trial = _Trial(guest, stack)
            for _ in range(CHECKPOINTS):
                time.sleep(_APART)
                if not trial.is_right():
                    return Tried(checkpoints=right, broke="an epoch was not what memory was")
                right += 1
            trial.log.end()
            if not guest.goes_on() or migration_settings.settings_facts(
                guest, want=migration_settings.IGNORE_SHARED, runs=None, folder=None
            ) != trial.undo:  # fmt: skip
                return Tried(checkpoints=right, broke="the guest was not as before in the end")
    except (VmckptError, OSError) as exc:
        return Tried(checkpoints=right, broke=str(exc))
    return Tried(checkpoints=right)


class _Trial:
    """A scratch guest's epochs, each against what its memory was then."""

    def __init__(self, guest: Scratch, stack: ExitStack) -> None:
        file = os.memfd_create("vmckpt-trial", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, scratch_qemu.SIZE)
            self._last = stack.enter_context(Mapping(file, scratch_qemu.SIZE, write=True))
        finally:
            os.close(file)
        self._guest = guest
        self._seen: Pages = np.zeros((0, 0), dtype=np.uint64)
        self.undo = migration_settings.settings_facts(
            guest, want=migration_settings.IGNORE_SHARED, runs=None, folder=None
        )
        self.log = DirtyLog(
            guest, self.undo, files=guest.files, last=[self._last], most=2 * scratch_qemu.PAGES,
            output=self, logs=(), still=lambda on: None,
        )  # fmt: skip
        self._settle(self.log.begin(colo_dirty_log.dirty_log_facts(guest)))

    def close_epoch(self) -> int:
        """The guest stands still: its memory is what the epoch must come to."""
        self._seen = self._guest.memory.pages.copy()
        return 0

    def is_right(self) -> bool:
        """Whether the next epoch holds all that changed."""
        self._settle(self.log.take())
        return np.array_equal(self._seen, self._last.pages)

    def _settle(self, epoch: Epoch) -> None:
        for one in epoch.changed:
            self._last.pages[one.numbers] = one.pages
            self._last.written[one.numbers] = True
