"""Choose the method that finds changed pages on a host, and test it on a scratch guest.

QEMU's dirty log needs KVM: under TCG, COLO deadlocks after a few checkpoints. QEMU 10 does not
enter COLO when it should. No QEMU is assumed to work until it has been tested. Test results are
stored.
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
from vmckpt.units import show_count

CHECKPOINTS = 20
_APART = 0.01
_FILE = "finder.json"


class Finder(StrEnum):
    """Methods to find changed pages."""

    COMPARE = "compare"
    DIRTY_LOG = "dirty-log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The method to use, and the reason, for display."""

    finder: Finder
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The result of testing the dirty log on a scratch guest."""

    checkpoints: int
    """Number of correct checkpoints."""
    broke: str = ""
    """Why the test failed. Empty: no failure, and the guest was running and could be migrated
    afterwards."""


def decide(accelerator: str, *, guarded: bool, tried: Tried | None) -> Choice | None:
    """Choose a method. Returns None if the dirty log must be tested first. Pure.

    `guarded`: libvirt cannot migrate or save the guest while COLO is on. QEMU does not refuse a
    migration during COLO, and afterwards can neither be migrated nor leave COLO. The mirror jobs of
    the disks do not prevent a migration.
    """
    if accelerator != "kvm":
        why = f"QEMU's dirty log needs kvm, but the guest is running under {accelerator}"
        return Choice(finder=Finder.COMPARE, why=why)
    if not guarded:
        why = "nothing prevents saving or migrating the guest while QEMU's dirty log is on"
        return Choice(finder=Finder.COMPARE, why=why)
    if tried is None:
        return None
    if tried.broke:
        why = f"QEMU's dirty log failed on a scratch guest: {tried.broke}"
        return Choice(finder=Finder.COMPARE, why=why)
    count = show_count(tried.checkpoints, "time")
    if tried.checkpoints < CHECKPOINTS:
        why = f"QEMU's dirty log was correct only {count} on a scratch guest"
        return Choice(finder=Finder.COMPARE, why=why)
    why = f"QEMU's dirty log was correct {count} on a scratch guest"
    return Choice(finder=Finder.DIRTY_LOG, why=why)


def choose(
    folder: Path, *, qemu: str, accelerator: str, guarded: bool, trying: Callable[[], Tried]
) -> Choice:
    """Choose a method, and test the dirty log if necessary.

    `folder`: directory with the results, by QEMU's version (`qemu`) and accelerator. `trying` runs
    the test, for example `tryout`; it is called only if the result matters and is not stored yet.
    Raises OSError.
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
    """Return the stored result of a test; None: there is no result, or it is invalid."""
    found = _told(folder).get(_key(qemu, accelerator))
    match found:
        case {"checkpoints": int(checkpoints), "broke": str(broke)}:
            return Tried(checkpoints=checkpoints, broke=broke)
        case _:
            return None


def remember(folder: Path, qemu: str, accelerator: str, tried: Tried) -> None:
    """Store the result of a test. Raises OSError."""
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
    """Capture epochs of a scratch guest and compare each epoch with the guest's memory.

    This takes half a second, or up to half a minute if QEMU hangs.
    """
    right = 0
    try:
        with ExitStack() as stack:
            guest = stack.enter_context(Scratch(qemu=qemu, accelerator=accelerator))
            trial = _Trial(guest, stack)
            for _ in range(CHECKPOINTS):
                time.sleep(_APART)
                if not trial.is_right():
                    return Tried(checkpoints=right, broke="an epoch differed from memory")
                right += 1
            trial.log.end()
            if not guest.goes_on() or migration_settings.settings_facts(
                guest, want=migration_settings.IGNORE_SHARED, runs=None, folder=None
            ) != trial.undo:  # fmt: skip
                return Tried(checkpoints=right, broke="the guest was not restored at the end")
    except (VmckptError, OSError) as exc:
        return Tried(checkpoints=right, broke=str(exc))
    return Tried(checkpoints=right)


class _Trial:
    """The epochs of a scratch guest, each compared with the guest's memory at its capture."""

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
        """Copy the memory while the guest is paused: the epoch must match this copy."""
        self._seen = self._guest.memory.pages.copy()
        return 0

    def is_right(self) -> bool:
        """Capture an epoch. Returns whether the epoch contains all changes."""
        self._settle(self.log.take())
        return np.array_equal(self._seen, self._last.pages)

    def _settle(self, epoch: Epoch) -> None:
        for one in epoch.changed:
            self._last.pages[one.numbers] = one.pages
            self._last.written[one.numbers] = True
