"""When a guest that moves by epochs is switched: scenarios of what its epochs cost."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from vmckpt.protection.migration.switchover import (
    Cost,
    Limits,
    SwitchoverAction,
    SwitchoverFacts,
    decide,
    expected,
)
from vmckpt.units import Seconds

LIMITS = Limits(max_downtime=Seconds(0.3), time=Seconds(60.0))


def costs(*both: tuple[float, float]) -> tuple[Cost, ...]:
    return tuple(Cost(pause=Seconds(pause), busy=Seconds(busy)) for pause, busy in both)


SMALL = costs((0.02, 0.05), (0.02, 0.06), (0.03, 0.05))
LARGE = costs((0.02, 0.9), (0.02, 0.8), (0.02, 0.85))


def after(elapsed: float, recent: Sequence[Cost], *, ready: bool = True) -> SwitchoverAction:
    return decide(SwitchoverFacts(elapsed=Seconds(elapsed), ready=ready, recent=recent), LIMITS).do


def test_an_epoch_costs_what_the_worst_of_the_last_three_did_and_its_loading() -> None:
    assert expected(()) is None
    assert expected(costs((0.02, 0.05))) == pytest.approx(0.12)
    assert expected((*LARGE, *SMALL)) == pytest.approx(0.02 + 0.06 + 0.05)
    assert expected((*SMALL, *LARGE[:1])) == pytest.approx(0.97)


@pytest.mark.parametrize(
    ("elapsed", "recent", "ready", "does"),
    [
        (1.0, (), False, SwitchoverAction.GO_ON),
        (1.0, SMALL, False, SwitchoverAction.GO_ON),
        (1.0, SMALL[:2], True, SwitchoverAction.GO_ON),
        (1.0, SMALL, True, SwitchoverAction.SWITCH),
        (1.0, LARGE, True, SwitchoverAction.GO_ON),
        (1.0, (*SMALL, *LARGE[:1]), True, SwitchoverAction.GO_ON),
        (1.0, (*LARGE, *SMALL), True, SwitchoverAction.SWITCH),
        (59.9, LARGE, True, SwitchoverAction.GO_ON),
        (60.0, LARGE, True, SwitchoverAction.GIVE_UP),
        (60.0, SMALL, True, SwitchoverAction.SWITCH),
        (60.0, SMALL, False, SwitchoverAction.GIVE_UP),
        (60.0, (), False, SwitchoverAction.GIVE_UP),
    ],
)
def test_each_moment_is_decided(
    elapsed: float, recent: Sequence[Cost], ready: bool, does: SwitchoverAction
) -> None:
    assert after(elapsed, recent, ready=ready) is does


def test_a_first_copy_then_epochs_that_shrink_then_the_switch() -> None:
    """As a guest that calms down: it is switched as soon as three in a row fit."""
    busy = (2.0, 1.0, 0.5, 0.28, 0.2, 0.15, 0.12, 0.1)
    told = [after(float(at), costs(*((0.02, one) for one in busy[:at]))) for at in range(9)]
    assert told == [SwitchoverAction.GO_ON] * 7 + [SwitchoverAction.SWITCH] * 2


def test_without_a_time_limit_it_goes_on_for_ever() -> None:
    for_ever = replace(LIMITS, time=None)
    seen = SwitchoverFacts(elapsed=Seconds(1e6), ready=True, recent=LARGE)
    assert decide(seen, for_ever).do is SwitchoverAction.GO_ON


def test_what_is_decided_is_said_with_its_numbers() -> None:
    switch = decide(SwitchoverFacts(elapsed=Seconds(1.0), ready=True, recent=SMALL), LIMITS)
    assert switch.why == "the final epoch is expected to take 130 ms; the limit is 300 ms"
    assert switch.downtime == pytest.approx(0.13)
    late = decide(SwitchoverFacts(elapsed=Seconds(61.0), ready=True, recent=LARGE), LIMITS)
    assert late.why == "time limit reached: a switchover would take 970 ms; the limit is 300 ms"
    copying = decide(SwitchoverFacts(elapsed=Seconds(61.0), ready=False), LIMITS)
    assert copying.why == "time limit reached: the first copy was not complete"
