"""What of an interrupted restore is in its place, and what that means. Pure.

Nothing is removed that may be the only whole copy of a disk, or has been written into: where that
cannot be told, all files stay, and somebody is told.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Spot(StrEnum):
    """What is at an image's place now."""

    NEW = "the restored image"
    WRITTEN = "the restored image, written into since"
    OTHER = "another file"
    NOTHING = "nothing"


class LeftoverDecision(StrEnum):
    """How an interrupted restore is settled."""

    ARRIVED = "arrived"
    BACK = "back"
    """It has not happened: what was there before belongs there."""
    UNCLEAR = "unclear"
    """Nobody can tell which images are the right ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """One image."""

    spot: Spot
    aside: bool
    """What was there before is beside it."""
    empty: bool
    """Nothing was there before."""

    @property
    def ours(self) -> bool:
        return self.spot in (Spot.NEW, Spot.WRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestFacts:
    """The guest."""

    runs: bool
    revived: bool
    """Its QEMU was started to take memory in, and not to boot."""


def spot(there: str | None, made: str) -> Spot:
    """Marks (see replace_file.mark) of what is there (None: nothing) and of what was made."""
    if there is None:
        return Spot.NOTHING
    if there == made:
        return Spot.NEW
    return Spot.WRITTEN if there.partition(":")[0] == made.partition(":")[0] else Spot.OTHER


def decide(
    disks: Sequence[ImageFacts], seat: GuestFacts, *, memory: bool
) -> tuple[LeftoverDecision, str]:
    """What has become of a restore that was about to put images in their places, and why.

    `memory`: a guest was to be started from it.
    """
    if all(one.ours for one in disks):
        return _all_there(disks, seat, memory=memory)
    if any(one.spot is Spot.OTHER and one.aside for one in disks):
        return LeftoverDecision.UNCLEAR, "a file that is neither is in the place of an image"
    if any(one.spot is Spot.WRITTEN for one in disks):
        return LeftoverDecision.UNCLEAR, "some images are the restored ones, and were written into"
    if seat.runs and any(one.ours or one.aside for one in disks):
        return (
            LeftoverDecision.UNCLEAR,
            "the guest runs on some restored images and some from before",
        )
    return LeftoverDecision.BACK, ""


def _all_there(
    disks: Sequence[ImageFacts], seat: GuestFacts, *, memory: bool
) -> tuple[LeftoverDecision, str]:
    # What is put aside goes only once the guest runs, or its disks were all that was wanted.
    kept = any(not one.empty for one in disks) and not any(one.aside for one in disks)
    if not memory or kept or (seat.runs and seat.revived):
        return LeftoverDecision.ARRIVED, ""
    if seat.runs:
        return (
            LeftoverDecision.UNCLEAR,
            "the guest runs on the restored images, but was booted anew",
        )
    if any(one.spot is Spot.WRITTEN for one in disks):
        return (
            LeftoverDecision.UNCLEAR,
            "the guest is off, and the restored images were written into",
        )
    return LeftoverDecision.BACK, ""
