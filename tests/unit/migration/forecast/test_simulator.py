import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.worlds import terms, world
from vmckpt.migration.forecast.simulator import simulate
from vmckpt.model.migration import AutoConverge, Mode
from vmckpt.policy.model import (
    Compress,
    GiveUp,
    Pause,
    RaiseDowntime,
    Rule,
    RuleCondition,
    StartPostcopy,
    Throttle,
)
from vmckpt.units import MIB, Bytes, Seconds


def test_an_idle_guest_is_sent_once() -> None:
    found = simulate(world(100, bandwidth=50), terms())

    assert found.completed
    assert found.sent == pytest.approx(100 * MIB)
    assert found.total == pytest.approx(0.5 + 100 / 50 + 0.02)
    assert found.passes == 1


def test_a_guest_that_fits_into_the_downtime_is_stopped_after_the_first_readings() -> None:
    found = simulate(world(100, bandwidth=1000), terms())

    assert found.completed
    assert found.downtime is not None
    assert found.downtime < 0.03
    assert found.total == pytest.approx(0.5 + 0.1 + 0.02)


def test_a_guest_that_writes_faster_than_the_link_never_ends() -> None:
    found = simulate(world(200, region=128, rate=60, bandwidth=30), terms())

    assert not found.completed
    assert math.isinf(found.total)
    assert found.downtime is None


def test_the_time_limit_ends_it_with_the_guest_in_its_place() -> None:
    found = simulate(world(200, region=128, rate=60, bandwidth=30), terms(limit=40))

    assert not found.completed
    assert found.total == pytest.approx(40)
    assert found.sent == pytest.approx((40 - 0.5) * 30 * MIB, rel=0.02)


def test_a_working_set_that_fits_into_the_downtime_converges_however_fast_it_is_written() -> None:
    found = simulate(world(100, region=5, rate=90, bandwidth=50), terms())

    assert found.completed
    assert found.downtime is not None
    assert found.downtime < 0.32


def test_mode_post_copy_sends_each_page_once() -> None:
    here = world(200, region=64, rate=60, bandwidth=30)

    found = simulate(here, terms(mode=Mode.POSTCOPY))

    assert found.completed
    assert found.switched
    assert [one.action for one in found.planned] == ["switch to post-copy"]
    assert found.sent == pytest.approx(200 * MIB, rel=0.05)


def test_in_post_copy_the_guest_waits_for_pages_behind_what_is_in_the_sockets() -> None:
    here = replace(world(200, region=64, rate=60, bandwidth=30), backlog=3 * MIB, waits=10)

    found = simulate(here, terms(mode=Mode.POSTCOPY))

    assert found.downtime == pytest.approx(3 / 30 + 0.02 + 10 * 3 / 30)


def test_stop_and_copy_stands_still_for_all_of_it() -> None:
    found = simulate(world(100, bandwidth=50), terms(mode=Mode.STOP_AND_COPY))

    assert found.downtime == pytest.approx(2.02)
    assert found.total == pytest.approx(2.52)


BUSY = world(200, region=64, rate=60, bandwidth=30)


def test_a_longer_downtime_ends_what_a_short_one_does_not() -> None:
    rule = Rule(
        name="longer", when=RuleCondition(iteration=2),
        do=RaiseDowntime(by=Seconds(1.0), to=Seconds(4.0)),
    )  # fmt: skip

    found = simulate(BUSY, terms(rule))

    assert found.completed
    assert found.downtime is not None
    assert 1.3 < found.downtime < 2.35
    assert [one.action for one in found.planned] == [
        "allow 1.3 s of downtime",
        "allow 2.3 s of downtime",
    ]


def test_a_slowed_guest_converges() -> None:
    rule = Rule(
        name="slow", when=RuleCondition(iteration=2),
        do=Throttle(AutoConverge(initial=50, increment=20, at_most=90)),
    )  # fmt: skip

    found = simulate(BUSY, terms(rule))

    assert found.completed
    assert found.passes > 4


def test_small_differences_are_sent_faster() -> None:
    rule = Rule(name="xbzrle", when=RuleCondition(iteration=2), do=Compress(Bytes(64 * MIB)))

    assert simulate(replace(BUSY, differences=0.2), terms(rule)).completed
    assert not simulate(BUSY, terms(rule)).completed


def test_a_paused_guest_is_copied_to_the_end() -> None:
    rule = Rule(name="pause", when=RuleCondition(iteration=3), do=Pause())

    found = simulate(BUSY, terms(rule))

    assert found.completed
    assert found.downtime is not None
    assert found.downtime > 1.0


def test_a_policy_gives_up() -> None:
    rule = Rule(name="no use", when=RuleCondition(iteration=3), do=GiveUp())

    found = simulate(BUSY, terms(rule))

    assert not found.completed
    assert [one.rule for one in found.planned] == ["no use"]


def test_a_stall_switches_in_its_time() -> None:
    rule = Rule(name="stalled", when=RuleCondition(stalled_for=Seconds(10.0)), do=StartPostcopy())

    found = simulate(BUSY, terms(rule, mode=Mode.HYBRID))

    assert found.switched
    assert 15 < found.planned[0].at < 40


speeds = st.floats(1, 400)


@given(
    in_use=st.floats(1, 256),
    region=speeds,
    rate=speeds,
    bandwidth=speeds,
    downtime=st.floats(0.05, 3),
)
def test_every_migration_with_a_limit_ends(
    in_use: float, region: float, rate: float, bandwidth: float, downtime: float
) -> None:
    here = world(in_use, region=min(region, in_use), rate=rate, bandwidth=bandwidth)

    found = simulate(here, terms(limit=300, downtime=downtime))

    assert found.total <= 301 + in_use / bandwidth
    assert found.completed == (found.downtime is not None)
    assert found.sent <= found.total * bandwidth * MIB * 1.001 + MIB
    if found.completed:
        assert found.sent >= in_use * MIB * 0.999
        assert found.downtime is not None
        # Never much more than the limit: what was dirtied in one slice on top.
        assert found.downtime <= downtime + 0.02 + 0.05 * (1 + rate / bandwidth) + 0.15
