"""What can be done about a migration, in a few words."""

import pytest

from vmckpt.migration.run.actions import (
    Abort,
    Action,
    LimitBandwidth,
    PauseGuest,
    SetDowntime,
    SetThrottle,
    SetXbzrleCache,
    Stop,
    SwitchToPostcopy,
    says,
)
from vmckpt.model.migration import AutoConverge
from vmckpt.units import MIB, Bytes, BytesPerSecond, Seconds

WORDS: list[tuple[Action, str]] = [
    (SetDowntime(Seconds(0.2)), "allow 200 ms of downtime"),
    (
        SetThrottle(AutoConverge(initial=20, increment=10, at_most=60)),
        "slow the guest down by 20 % to 60 %",
    ),
    (SetXbzrleCache(Bytes(64 * MIB)), "compress with a cache of 64 MiB"),
    (LimitBandwidth(BytesPerSecond(50 * MIB)), "limit to 50 MiB/s"),
    (LimitBandwidth(None), "lift the limit"),
    (SwitchToPostcopy(), "switch to post-copy"),
    (PauseGuest(), "pause the guest"),
    *((Abort(why), "abort") for why in Stop),
]


@pytest.mark.parametrize(("action", "words"), WORDS)
def test_each_is_said_in_words_of_its_own(action: Action, words: str) -> None:
    assert says(action) == words
