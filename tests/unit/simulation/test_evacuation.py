"""An evacuation in a made-up world: whatever goes wrong, everybody runs once."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.fleets import OFF, TERMS, fleet, guest, host, random_fleet
from vmckpt.evacuation.plan.fleet import Rules
from vmckpt.evacuation.schedule import Windows
from vmckpt.evacuation.state import (
    EvacuationTerms,
    RetryLimits,
)
from vmckpt.simulation.evacuation import Luck, Sim
from vmckpt.units import BytesPerSecond


def in_order(sim: Sim) -> None:
    """What must be true at every moment."""
    names = [one.name for one in sim.fleet.tenants]
    assert len(names) == len(set(names))
    held = {one.name: 0 for one in sim.fleet.places}
    for one in sim.fleet.tenants:
        held[one.host] += one.memory
    for under in sim.course.running:
        held[under.move.target] += under.move.tenant.memory
    keep = sim._terms.rules.keep_free
    for place in sim.fleet.places:
        arrivals = [m for m in sim.moved if m.target == place.name] + [
            u.move for u in sim.course.running if u.move.target == place.name
        ]
        assert not arrivals or held[place.name] <= place.memory * (1 - keep) + 1
    together = [under.move.name for under in sim.course.running]
    assert len(together) == len(set(together))
    assert not {one.name for one in sim.course.waiting} & set(together)


@given(st.integers(0, 10**6), st.integers(3, 12), st.floats(0.2, 0.6), st.floats(0.0, 0.3))
@example(3825, 3, 0.5, 0.0)
@example(527, 3, 0.2265625, 0.25)
@settings(max_examples=40)
def test_whatever_goes_wrong_everybody_runs_once_and_is_accounted_for(
    seed: int, hosts: int, full: float, fails: float
) -> None:
    made, leaving = random_fleet(seed, hosts, hosts * 6, full=full)
    asked = frozenset(one.name for one in leaving)
    terms = EvacuationTerms(
        rules=Rules(keep_free=0.05), windows=Windows(per_source=3, per_target=3)
    )
    luck = Luck(fails=fails, broken=frozenset({"h1"}) if seed % 3 == 0 else frozenset())
    sim = Sim(made, asked, terms, luck=luck, seed=seed)
    sim.run(in_order)

    assert sim.course.over
    where = {one.name: one.host for one in sim.fleet.tenants}
    left = {one.tenant.name for one in sim.course.left}
    assert {name for name in asked if where[name] == "h0"} <= left
    # Who was to make room for another one, and could not, had left before.
    twice = [one.name for one in sim.moved if one.name in asked]
    assert {name for name in left & asked if where[name] != "h0"} <= set(twice)
    # Nobody is moved again but for one that has failed twice where there was room for both.
    often = any(len(failures) > 1 for failures in sim.course.failed.values())
    assert often or len(twice) == len(set(twice))
    if luck.broken:
        assert all(one.target != "h1" for one in sim.moved)


def test_a_run_without_mishap_moves_all_of_them() -> None:
    made, leaving = random_fleet(7, 12, 60, full=0.4)
    sim = Sim(made, frozenset(one.name for one in leaving), TERMS, luck=Luck(), seed=7)
    sim.run(in_order)
    assert sim.course.left == ()
    assert len(sim.moved) == len(leaving)


def test_streams_that_do_not_fill_their_links_are_noticed_and_get_others_beside_them() -> None:
    """A forecast of all that the link has: nobody would be begun beside the first one."""
    link, most, count = 100_000_000, 45_000_000, 8
    hosts = [replace(one, link=BytesPerSecond(link)) for one in (OFF, host("b"), host("c"))]
    made = fleet(hosts, *(guest(f"g{number}", "a") for number in range(count)))
    asked = frozenset(one.name for one in made.tenants)
    sim = Sim(made, asked, TERMS, luck=Luck(off=0.0, most=BytesPerSecond(most)), seed=1)
    sim.run(in_order)
    assert len(sim.moved) == count
    one_after_the_other = sum(one.travels for one in made.tenants) / most
    assert sim.now < 0.65 * one_after_the_other


@pytest.mark.parametrize("tries", [1, 2])
def test_retries_are_bounded(tries: int) -> None:
    made = fleet([OFF, host("b"), host("c")], guest("x", "a"))
    terms = replace(TERMS, patience=RetryLimits(tries=tries))
    sim = Sim(made, frozenset({"x"}), terms, luck=Luck(broken=frozenset("bc")), seed=1)
    sim.run(in_order)
    times, last = ("1 time", "b") if tries == 1 else (f"{tries} times", "c")
    assert [one.why for one in sim.course.left] == [
        f"tried {times}, most recently to {last}: {last} refuses"
    ]
