"""The mode to move in, and a forecast beside what came of it."""

from dataclasses import replace

import pytest

from tests.support.builders import sample
from tests.support.policies import policy
from tests.support.worlds import facts
from vmckpt.migration.forecast import forecast, service
from vmckpt.migration.forecast.forecast import Forecast, Range
from vmckpt.migration.forecast.service import GuestForecast
from vmckpt.migration.run.engine import Ending
from vmckpt.migration.run.progress import UNKNOWN
from vmckpt.model.migration import Driver, JobTotals, Mode, Outcome
from vmckpt.units import Bytes, Seconds

PRE = Forecast(
    mode=Mode.PRECOPY, total=Range(4, 6), downtime=Range(0.1, 0.3), sent=Range(100, 200),
    converges=True, switches=False, passes=Range(2, 3), planned=(), basis=(),
)  # fmt: skip
OUTLOOK = GuestForecast(facts=facts(), forecasts=(PRE,))
ENDING = Ending(
    outcome=Outcome.COMPLETED, driver=Driver.PEER_TO_PEER, began=Seconds(0.0),
    elapsed=Seconds(9.0), samples=(sample(1.0, transferred=150),), decisions=(), warnings=(),
    error=None, totals=JobTotals(
        total=Seconds(5.0), setup=Seconds(0.1), downtime=Seconds(0.4), iterations=3,
        transferred=Bytes(150),
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "post_copy", "chosen", "why"),
    [
        ("precopy", True, Mode.PRECOPY, "set by the policy"),
        ("hybrid", True, Mode.HYBRID, "set by the policy"),
        ("hybrid", False, Mode.PRECOPY, "post-copy is not possible for this guest on these hosts"),
        ("auto", False, Mode.PRECOPY, "nothing was measured"),
    ],
)
def test_without_a_look_ahead_the_policy_has_the_word(
    mode: str, post_copy: bool, chosen: Mode, why: str
) -> None:
    made = replace(policy(), mode=Mode(mode))

    assert service.mode_of(made, None, post_copy=post_copy) == (chosen, why)


def test_by_epochs_it_is_said_how_long_the_last_one_may_take() -> None:
    made = policy(
        "version: vmckpt/v1\nname: mine\nmode: checkpoint\nlimits: {max_downtime: 400ms}\n"
    )
    mode, why = service.mode_of(made, None, post_copy=True)

    assert mode is Mode.CHECKPOINT
    assert why.endswith("at most 400 ms")


def test_a_forecast_counts_only_for_a_policy_that_leaves_the_mode_open() -> None:
    auto, hybrid = (replace(policy(), mode=mode) for mode in (Mode.AUTO, Mode.HYBRID))

    assert service.mode_of(auto, OUTLOOK, post_copy=True)[0] is Mode.PRECOPY
    assert service.mode_of(hybrid, OUTLOOK, post_copy=True)[0] is Mode.HYBRID


def test_an_outlook_tells_of_modes_that_were_looked_at() -> None:
    assert OUTLOOK.of(Mode.PRECOPY) is PRE
    assert OUTLOOK.as_json(Mode.PRECOPY)["expected"] == PRE.as_json()
    assert OUTLOOK.as_json(Mode.HYBRID)["expected"] is None
    assert OUTLOOK.curve == facts().curve(0.5)
    assert GuestForecast(facts=replace(facts(), dirty=()), forecasts=()).curve is UNKNOWN


def test_a_forecast_is_scored_by_libvirts_totals_where_there_are_any() -> None:
    told = service.score(OUTLOOK, Mode.PRECOPY, ENDING)
    without = service.score(OUTLOOK, Mode.PRECOPY, replace(ENDING, totals=None))

    assert told is not None
    assert without is not None
    assert told["total"]["covered"]
    assert not told["downtime"]["covered"]
    assert not without["total"]["covered"]
    assert without["sent"]["covered"]
    assert service.score(OUTLOOK, Mode.HYBRID, ENDING) is None


def test_a_forecast_from_defaults_shows_no_high_end() -> None:
    guessed = replace(PRE, known=False)

    assert forecast.in_words(guessed) == (
        "precopy: 4.0 s or more, downtime 100 ms or more, sends 100 B or more"
    )
    told = guessed.as_json()
    assert (told["total_ms"], told["downtime_ms"], told["bytes"]) == (
        [4000.0, None], [100.0, None], [100, None],
    )  # fmt: skip
    assert (
        forecast.in_words(PRE) == "precopy: 4.0 s to 6.0 s, downtime 100 ms to 300 ms, sends"
        " 100 B to 200 B"
    )


def test_a_forecast_from_defaults_is_scored_as_it_was_shown() -> None:
    outlook = GuestForecast(facts=facts(), forecasts=(replace(PRE, known=False),))
    assert ENDING.totals is not None
    slow = replace(ENDING, totals=replace(ENDING.totals, total=Seconds(40.0)))
    told = service.score(outlook, Mode.PRECOPY, slow)

    assert told is not None
    assert told["total"] == {
        "expected": [4, None], "measured": 40.0, "covered": True, "width": None,
    }  # fmt: skip


def test_copied_disks_count_as_sent_as_they_do_in_the_forecast() -> None:
    """1.9 GiB were forecast and sent; the report compared them with the memory alone."""
    outlook = GuestForecast(facts=replace(facts(), disks=Bytes(40)), forecasts=(PRE,))
    told = service.score(outlook, Mode.PRECOPY, ENDING)
    assert told is not None
    assert told["sent"]["measured"] == 190

    after_post_copy = service.score(outlook, Mode.PRECOPY, replace(ENDING, totals=None))
    assert after_post_copy is not None
    assert after_post_copy["sent"] is None
