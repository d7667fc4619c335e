"""What has become of a restore that was interrupted, by what is left of it."""

import pytest

from vmckpt.agent.restore.leftovers import (
    GuestFacts,
    ImageFacts,
    LeftoverDecision,
    Spot,
    decide,
    spot,
)

OFF, REVIVED = GuestFacts(runs=False, revived=False), GuestFacts(runs=True, revived=True)


BOOTED = GuestFacts(runs=True, revived=False)


def seen(at: Spot, *, aside: bool = False, empty: bool = False) -> ImageFacts:
    return ImageFacts(spot=at, aside=aside, empty=empty)


IN_PLACE, UNTOUCHED = seen(Spot.NEW, aside=True), seen(Spot.OTHER)


MOVED, FRESH = seen(Spot.NOTHING, aside=True), seen(Spot.NEW, empty=True)


KEPT, USED = seen(Spot.NEW), seen(Spot.WRITTEN, aside=True)


@pytest.mark.parametrize(
    ("disks", "seat", "memory", "verdict"),
    [
        ([UNTOUCHED, UNTOUCHED], OFF, True, LeftoverDecision.BACK),
        (
            [UNTOUCHED, UNTOUCHED],
            BOOTED,
            True,
            LeftoverDecision.BACK,
        ),  # the one that was to be ended
        ([MOVED, UNTOUCHED], OFF, True, LeftoverDecision.BACK),
        ([IN_PLACE, UNTOUCHED], OFF, True, LeftoverDecision.BACK),
        ([IN_PLACE, UNTOUCHED], BOOTED, True, LeftoverDecision.UNCLEAR),  # autostart, on half of it
        ([IN_PLACE, MOVED], REVIVED, True, LeftoverDecision.UNCLEAR),
        ([USED, UNTOUCHED], OFF, True, LeftoverDecision.UNCLEAR),
        ([IN_PLACE, IN_PLACE], OFF, True, LeftoverDecision.BACK),
        ([IN_PLACE, IN_PLACE], REVIVED, True, LeftoverDecision.ARRIVED),
        (
            [IN_PLACE, IN_PLACE],
            BOOTED,
            True,
            LeftoverDecision.UNCLEAR,
        ),  # autostart, without its memory
        ([USED, IN_PLACE], REVIVED, True, LeftoverDecision.ARRIVED),
        ([USED, IN_PLACE], OFF, True, LeftoverDecision.UNCLEAR),
        ([KEPT, KEPT], OFF, True, LeftoverDecision.ARRIVED),  # it has run, and ended since
        ([KEPT, KEPT], BOOTED, True, LeftoverDecision.ARRIVED),
        ([FRESH, FRESH], OFF, True, LeftoverDecision.BACK),
        ([FRESH, FRESH], REVIVED, True, LeftoverDecision.ARRIVED),
        ([seen(Spot.WRITTEN, empty=True)], OFF, True, LeftoverDecision.UNCLEAR),
        ([seen(Spot.OTHER, aside=True)], OFF, True, LeftoverDecision.UNCLEAR),
        # Disks alone: nothing is started, and a guest that runs says nothing.
        ([IN_PLACE, IN_PLACE], OFF, False, LeftoverDecision.ARRIVED),
        ([KEPT, KEPT], OFF, False, LeftoverDecision.ARRIVED),
        ([KEPT, KEPT], BOOTED, False, LeftoverDecision.ARRIVED),
        ([IN_PLACE, MOVED], OFF, False, LeftoverDecision.BACK),
        ([UNTOUCHED, UNTOUCHED], BOOTED, False, LeftoverDecision.BACK),
    ],
)
def test_what_has_become_of_it(
    disks: list[ImageFacts], seat: GuestFacts, memory: bool, verdict: LeftoverDecision
) -> None:
    told, why = decide(disks, seat, memory=memory)
    assert told is verdict
    assert bool(why) == (verdict is LeftoverDecision.UNCLEAR)


@pytest.mark.parametrize(
    ("there", "found"),
    [(None, Spot.NOTHING), ("7:1", Spot.NEW), ("7:2", Spot.WRITTEN), ("8:1", Spot.OTHER)],
)
def test_an_image_is_known_by_its_inode_and_when_it_was_written(
    there: str | None, found: Spot
) -> None:
    assert spot(there, "7:1") is found
