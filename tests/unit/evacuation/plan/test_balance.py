"""Moves that pay for themselves, and none that do not."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fleets import fleet, guest, host, random_fleet
from vmckpt.evacuation.plan import balance
from vmckpt.evacuation.plan.capacity import CapacityModel
from vmckpt.evacuation.plan.fleet import Fleet, Rules
from vmckpt.units import BytesPerSecond

RULES = Rules(keep_free=0.05)


def after(made: Fleet, found: list[balance.Proposed]) -> Fleet:
    goes = {one.tenant.name: one.target for one in found}
    return replace(
        made, tenants=tuple(replace(t, host=goes.get(t.name, t.host)) for t in made.tenants)
    )


def unequal(made: Fleet) -> float:
    load = CapacityModel(made.places, made.tenants, RULES).load
    return float((load**2).sum())


def test_a_full_host_gives_to_an_empty_one_until_they_are_equal() -> None:
    made = fleet([host("a"), host("b")], *(guest(f"g{n}", "a", 8) for n in range(6)))
    found = balance.propose(made, RULES)
    assert len(found) == 3
    assert {one.target for one in found} == {"b"}


def test_nearly_equal_hosts_are_left_alone() -> None:
    made = fleet(
        [host("a"), host("b")],
        *(guest(f"a{n}", "a", 4) for n in range(5)), *(guest(f"b{n}", "b", 4) for n in range(4)),
    )  # fmt: skip
    assert balance.propose(made, RULES) == []
    # Nor is what was made equal moved back.
    full = fleet([host("a"), host("b")], *(guest(f"g{n}", "a", 8) for n in range(6)))
    assert balance.propose(after(full, balance.propose(full, RULES)), RULES) == []


def test_a_move_that_takes_too_long_for_what_it_gains_is_not_proposed() -> None:
    slow = BytesPerSecond(100_000)
    made = fleet(
        [host("a", link=slow), host("b", link=slow)], *(guest(f"g{n}", "a", 8) for n in range(3))
    )
    assert balance.propose(made, RULES) == []


def test_whoever_stays_stays() -> None:
    made = fleet([host("a"), host("b")], *(guest(f"g{n}", "a", 8, stays="x") for n in range(6)))
    assert balance.propose(made, RULES) == []
    closed = fleet([host("a"), host("b", closed="no")], *(guest(f"g{n}", "a", 8) for n in range(6)))
    assert balance.propose(closed, RULES) == []


@given(st.integers(0, 10**6), st.integers(2, 12))
@settings(max_examples=40)
def test_loads_become_more_equal_no_rule_is_broken_and_it_ends(seed: int, hosts: int) -> None:
    made, _ = random_fleet(seed, hosts, hosts * 8, full=0.6, empty=0)
    found = balance.propose(made, RULES)
    assert len({one.tenant.name for one in found}) == len(found)
    capacity, before = CapacityModel(made.places, made.tenants, RULES), unequal(made)
    for one in found:
        at = capacity.index[one.target]
        assert capacity.reasons_against(one.tenant, at) is None
        capacity.remove(one.tenant, capacity.index[one.tenant.host])
        capacity.place(one.tenant, at)
    moved = after(made, found)
    assert unequal(moved) <= before - balance.LEAST * len(found) + 1e-9
    # Nothing more than a few is left to propose, and that ends, too.
    for _ in range(4):
        again = balance.propose(moved, RULES)
        if not again:
            break
        assert unequal(after(moved, again)) < unequal(moved)
        moved = after(moved, again)
    else:
        raise AssertionError("it goes on and on")
