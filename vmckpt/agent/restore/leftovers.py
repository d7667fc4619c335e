"""Decide whether an interrupted restore is finished or undone, from the files it left. Pure.

A file is kept if it may be the only complete copy of a disk, or if it was written to. If that is
unclear, all files are kept, and the operator is informed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Spot(StrEnum):
    """What is now at the path of an image."""

    NEW = "the restored image"
    WRITTEN = "the restored image, modified since"
    OTHER = "another file"
    NOTHING = "nothing"


class LeftoverDecision(StrEnum):
    """The decision about an interrupted restore."""

    ARRIVED = "arrived"
    """The restore has succeeded: the previous images are removed."""
    BACK = "back"
    """The restore did not complete: the previous images are moved back."""
    UNCLEAR = "unclear"
    """It is unknown which images are valid, so all files are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """The state of one image."""

    spot: Spot
    aside: bool
    """The previous image still exists, beside the image's path."""
    empty: bool
    """There was no previous image."""

    @property
    def ours(self) -> bool:
        return self.spot in (Spot.NEW, Spot.WRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestFacts:
    """The state of the guest."""

    runs: bool
    revived: bool
    """The guest was started from saved memory, not booted."""


def spot(there: str | None, made: str) -> Spot:
    """Return what is at an image's path.

    `there`: mark (see replace_file.mark) of the file at the path; None: no file exists. `made`:
    mark of the restored image.
    """
    if there is None:
        return Spot.NOTHING
    if there == made:
        return Spot.NEW
    return Spot.WRITTEN if there.partition(":")[0] == made.partition(":")[0] else Spot.OTHER


def decide(
    disks: Sequence[ImageFacts], seat: GuestFacts, *, memory: bool
) -> tuple[LeftoverDecision, str]:
    """Decide about a restore that may have begun to swap images in.

    `seat`: the guest's state on this host; `memory`: the restore was meant to start a guest.
    Returns the decision, and the reason, which is empty unless the decision is UNCLEAR.
    """
    if all(one.ours for one in disks):
        return _all_there(disks, seat, memory=memory)
    if any(one.spot is Spot.OTHER and one.aside for one in disks):
        return LeftoverDecision.UNCLEAR, "an image was replaced by a file of unknown origin"
    if any(one.spot is Spot.WRITTEN for one in disks):
        return LeftoverDecision.UNCLEAR, "some of the restored images have been changed since"
    if seat.runs and any(one.ours or one.aside for one in disks):
        return (
            LeftoverDecision.UNCLEAR,
            "the guest is running on a mix of restored and previous images",
        )
    return LeftoverDecision.BACK, ""


def _all_there(
    disks: Sequence[ImageFacts], seat: GuestFacts, *, memory: bool
) -> tuple[LeftoverDecision, str]:
    # Previous images are removed only once the guest is running, or if only disks were requested.
    kept = any(not one.empty for one in disks) and not any(one.aside for one in disks)
    if not memory or kept or (seat.runs and seat.revived):
        return LeftoverDecision.ARRIVED, ""
    if seat.runs:
        return (
            LeftoverDecision.UNCLEAR,
            "the guest is running on the restored images, but was booted instead of resumed",
        )
    if any(one.spot is Spot.WRITTEN for one in disks):
        return (
            LeftoverDecision.UNCLEAR,
            "the guest is off, and some of the restored images have been changed since",
        )
    return LeftoverDecision.BACK, ""
