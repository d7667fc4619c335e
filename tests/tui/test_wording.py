"""How shares, times and hosts are put into words."""

import pytest

from tests.tui.still import FLEET
from vmckpt_tui import wording


@pytest.mark.parametrize("share", [-1.0, 0.0, 0.01, 0.5, 0.999, 1.0, 7.0])
def test_a_bar_is_as_wide_as_asked(share: float) -> None:
    assert len(wording.bar(share, 10)) == 10


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.0, "····"), (0.5, "██··"), (0.54, "██▏·"), (0.99, "███▉"), (1.0, "████")],
)
def test_a_bar_is_as_full_as_its_share(share: float, shown: str) -> None:
    assert wording.bar(share, 4) == shown


@pytest.mark.parametrize(
    ("passed", "told"),
    [(-5.0, "0 s"), (59.0, "59 s"), (60.0, "1 min"), (7300.0, "2 h"), (200_000.0, "2 d")],
)
def test_how_long_ago_is_told_roughly(passed: float, told: str) -> None:
    assert wording.ago(1000.0, 1000.0 + passed) == told


def test_a_host_and_a_time_in_words() -> None:
    assert wording.host_in_words(FLEET.hosts[1]) == "beta, 50 GiB of 64 GiB free"
    assert (wording.millis(340.0), wording.millis(None)) == ("340 ms", "–")
