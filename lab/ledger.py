"""Compare the three ledgers of a lab guest, to find lost data.

`judge` compares them and is pure. `audit` collects them: the guest checks its own memory and disk,
the observer reports the numbers that it received, and the disk image is read from outside.
"""

import asyncio
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vmckpt.errors import LabError
from vmckpt_lab import guests
from vmckpt_lab.observer import client, messages
from vmckpt_lab.observer.analysis import View
from vmckpt_lab.plan import LabPlan
from vmckpt_lab.shell import run

_SECTOR = 512
_RECORD_MAGIC = int.from_bytes(b"VMCREC1", "little")
_WORDS = struct.Struct("<64Q")
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The records of one run of a guest that were found in a disk image."""

    highest: int
    whole: int
    broken: int
    """Number of records of this run whose checksum or position is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The verdict on a ledger."""

    name: str
    whole: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The verdicts on the three ledgers of a guest."""

    guest: str
    entries: tuple[Entry, ...]

    @property
    def whole(self) -> bool:
        return all(entry.whole for entry in self.entries)


def checksum(words: tuple[int, ...]) -> int:
    """Return the FNV-1a hash over 64-bit words, as assets/prover.c computes it."""
    total = 0xCBF29CE484222325
    for word in words:
        total = (total ^ word) * 0x100000001B3 & _MASK
    return total


def read_records(image: bytes, run_id: int, told: int) -> Records:
    """Read the records of a run from a raw disk image.

    `told`: the highest number that the image must contain. Only the checksums of the last 2,000
    records are verified, which takes a second in Python; the guest itself verifies all records.
    """
    highest = whole = broken = 0
    slots = len(image) // 65536 * 128
    for slot in range(slots):
        magic, run_, number = struct.unpack_from("<3Q", image, slot * _SECTOR)
        if magic != _RECORD_MAGIC or run_ != run_id:
            continue
        words = _WORDS.unpack_from(image, slot * _SECTOR)
        recent = number > told - 2000
        if (number - 1) % slots != slot or (recent and checksum(words[:-1]) != words[-1]):
            broken += 1
        else:
            whole += 1
            highest = max(highest, number)
    return Records(highest=highest, whole=whole, broken=broken)


def judge(guest: str, seen: View, records: Records | None) -> Audit:
    """Compare the ledgers. `records`: None for a guest without a disk.

    Raises ValueError if `seen` does not contain the guest's answer to a verify request.
    """
    if seen.verified is None:
        raise ValueError("the guest has not answered a verify request")
    return Audit(
        guest=guest,
        entries=(_memory(seen.verified), _disk(seen, seen.verified, records), _output(seen)),
    )


def _memory(checked: messages.Message) -> Entry:
    text = f"{checked.pages_checked} pages checked, {checked.memory_errors} wrong"
    return Entry(name="memory", whole=checked.memory_errors == 0, text=text)


def _disk(seen: View, checked: messages.Message, records: Records | None) -> Entry:
    if records is None:
        return Entry(name="disk", whole=True, text="the guest has no disk")
    wrong = checked.disk_errors + records.broken
    text = (
        f"{checked.records_checked} records checked by the guest and {records.whole} in the image,"
        f" {wrong} wrong, the last is {records.highest}"
    )
    if records.highest < seen.highest:
        text += f", but numbers up to {seen.highest} were sent"
    whole = wrong == 0 and checked.records_checked > 0 and records.highest >= seen.highest
    return Entry(name="disk", whole=whole, text=text)


def _output(seen: View) -> Entry:
    restarts = f", {seen.runs - 1} restarts" if seen.runs != 1 else ""
    text = (
        f"{seen.heard} numbers received up to {seen.highest}, {seen.conflicts} sent twice,"
        f" {seen.forgotten} forgotten{restarts}"
    )
    whole = seen.conflicts == seen.forgotten == 0 and seen.runs == 1 and seen.heard > 0
    return Entry(name="output", whole=whole, text=text)


def audit(lab: LabPlan, name: str) -> Audit:
    """Check a guest's ledgers now, and return the verdicts.

    Raises LabError if the guest does not answer, or is not on exactly one host.
    """
    guest = guests.find(lab, name)
    seen = client.verify(lab.observer_socket, name)
    places = asyncio.run(guests.whereabouts(lab, name))
    if len(places) != 1:
        raise LabError(
            f"guest {name} must be on exactly one host; it was found on"
            f" {' and '.join(places) or 'none'}"
        )
    records = None
    if guest.disk:
        # The numbers that were sent are read before the image, so the image must contain them all.
        image = _raw_image(guests.disk_seen_from(lab, guest, places[0]), guest.disk_format)
        records = read_records(image, seen.run, seen.highest)
    return judge(name, seen, records)


def _raw_image(path: Path, disk_format: str) -> bytes:
    with tempfile.NamedTemporaryFile(dir="/var/tmp", suffix=".raw") as copy:
        run(
            [
                "qemu-img",
                "convert",
                "-U",
                "-T",
                "none",
                "-f",
                disk_format,
                "-O",
                "raw",
                str(path),
                copy.name,
            ]
        )
        return Path(copy.name).read_bytes()
