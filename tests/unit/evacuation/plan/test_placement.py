"""Who goes where: hard rules, the best of small plans, room made, and why not."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fleets import fleet, guest, host, needs, random_fleet
from vmckpt.evacuation.plan.capacity import CapacityModel, lacks
from vmckpt.evacuation.plan.fleet import Fleet, Rules, Tenant, Weights
from vmckpt.evacuation.plan.placement import Placement, place

RULES = Rules(keep_free=0.0)
OFF = host("a", closed="it is emptied")


def targets(found: Placement) -> dict[str, str]:
    return {one.tenant.name: one.target for one in found.going}


def broken(made: Fleet, found: Placement, rules: Rules) -> list[str]:
    """Hard rules that a placement breaks, in the end."""
    by_name = {one.name: one for one in made.places}
    where = {one.name: one.host for one in made.tenants} | targets(found)
    faults = []
    for one in found.going:
        target = by_name[one.target]
        if target.closed or lacks(one.tenant.needs, target) or one.target == one.tenant.host:
            faults.append(f"{one.tenant.name} may not be on {one.target}")
    changed = {one.target for one in found.going}
    for name in changed:
        there = [one for one in made.tenants if where[one.name] == name]
        target = by_name[name]
        if sum(one.memory for one in there) > target.memory * (1 - rules.keep_free) + 1:
            faults.append(f"{name} is overfull")
        for group in {group for one in found.going for group in one.tenant.apart}:
            arrived = [one for one in there if group in one.apart]
            if len(arrived) > 1 and any(one.name in targets(found) for one in arrived):
                faults.append(f"{group} is twice on {name}")
    return faults


def test_guests_spread_over_hosts() -> None:
    leaving = [guest(f"vm{n}", "a") for n in range(4)]
    made = fleet([host("a"), host("b"), host("c")], *leaving)
    found = place(made, leaving, RULES)
    assert sorted(targets(found).values()) == ["b", "b", "c", "c"]
    assert not found.left


def test_or_are_packed_on_few() -> None:
    leaving = [guest(f"vm{n}", "a") for n in range(4)]
    made = fleet([host("a"), host("b"), host("c")], guest("there", "c"), *leaving)
    found = place(made, leaving, Rules(keep_free=0.0, weights=Weights(spread=-1.0)))
    assert set(targets(found).values()) == {"c"}


def test_the_reasons_of_many_hosts_are_counted_without_amounts() -> None:
    hosts = [host(f"h{number}", 8 + number) for number in range(8)]
    hosts[7] = host("h7", closed="4 cores short")
    leaving = guest("big", "a", 60)
    (left,) = place(fleet([OFF, *hosts], leaving), [leaving], RULES).left
    assert left.why == "7 hosts: too little memory; 1 host: 4 cores short"


@pytest.mark.parametrize(
    ("wants", "why"),
    [
        ({"cpu": "v9"}, "no CPU v9"),
        ({"machine": "pc-9"}, "no machine type pc-9"),
        ({"networks": frozenset({"br-dmz"})}, "no network br-dmz"),
        ({"storage": frozenset({"ceph"})}, "no storage ceph"),
        ({"labels": frozenset({("rack", "7")})}, "not labelled rack=7"),
        ({"only": frozenset({"a"})}, "the guest can move only to a"),
        ({"never": frozenset({("b", "its standby is there")})}, "its standby is there"),
    ],
)
def test_who_lacks_what_a_guest_needs_does_not_get_it(wants: dict[str, object], why: str) -> None:
    leaving = [guest("vm", "a", needs=needs(**wants))]
    found = place(fleet([host("a"), host("b")], *leaving), leaving, RULES)
    (left,) = found.left
    assert left.why == f"b: {why}"
    assert why in left.hint or left.hint.startswith(
        ("fix this on another host", "make ceph available")
    )


def test_a_closed_host_gets_nobody() -> None:
    leaving = [guest("vm", "a")]
    made = fleet([host("a"), host("b", closed="in maintenance"), host("c", 8)], *leaving)
    assert targets(place(made, leaving, RULES)) == {"vm": "c"}


def test_memory_that_is_kept_free_stays_so() -> None:
    leaving = [guest("vm", "a", 4)]
    made = fleet([OFF, host("b", 10)], guest("there", "b", 5), *leaving)
    assert not place(made, leaving, Rules(keep_free=0.1)).left
    (left,) = place(made, leaving, Rules(keep_free=0.2)).left
    assert left.why == "b: lacks 1.0 GiB of memory"
    assert left.hint == "free up 1.0 GiB on b, or lower keep_free in the policy"


def test_two_of_a_group_are_kept_apart() -> None:
    apart = frozenset({"db"})
    leaving = [guest(f"vm{n}", "a", apart=apart) for n in range(2)]
    made = fleet([host("a"), host("b"), host("c")], *leaving)
    assert sorted(targets(place(made, leaving, RULES)).values()) == ["b", "c"]
    made = fleet([host("a"), host("b")], *leaving)
    (left,) = place(made, leaving, RULES).left
    assert "another guest of group db is there" in left.why


def test_who_leaves_steps_aside_for_who_fits_nowhere_else() -> None:
    # By size alone the big one would take b, where alone the small one can go.
    big, small = guest("big", "a", 6), guest("small", "a", 5, needs=needs(labels=frozenset(
        {("rack", "1")})))  # fmt: skip
    made = fleet([host("a"), host("b", 8, labels={"rack": "1"}), host("c", 8)], big, small)
    assert targets(place(made, [big, small], RULES)) == {"big": "c", "small": "b"}


def test_a_guest_that_would_have_stayed_makes_room_if_it_may() -> None:
    big, small = guest("big", "a", 7), guest("small", "b", 2)
    made = fleet([OFF, host("b", 8), host("c", 3)], big, small)
    found = place(made, [big], RULES)
    assert targets(found) == {"big": "b", "small": "c"}
    assert [one.displaced for one in found.going] == [False, True]
    assert "makes room" in found.going[1].why
    (left,) = place(made, [big], Rules(keep_free=0.0, may_displace=False)).left
    assert left.hint == "free up 1.0 GiB on b, or lower keep_free in the policy"


def test_who_cannot_be_moved_is_told_with_the_reason() -> None:
    leaving = [guest("vm", "a", stays="it holds a device of the host")]
    (left,) = place(fleet([host("a"), host("b")], *leaving), leaving, RULES).left
    assert left.why == "it holds a device of the host"


def test_a_preference_goes_before_an_even_load() -> None:
    leaving = [guest("vm", "a", prefers=frozenset({("rack", "1")}))]
    made = fleet([host("a"), host("b", labels={"rack": "1"}), host("c", 256)], *leaving)
    assert targets(place(made, leaving, RULES)) == {"vm": "b"}


def cost(made: Fleet, leaving: Sequence[Tenant], where: Sequence[str], rules: Rules) -> float:
    """What a whole assignment costs; inf if it breaks a rule."""
    capacity = CapacityModel(made.places, made.tenants, rules)
    total = 0.0
    for tenant, name in zip(leaving, where, strict=True):
        at = capacity.index[name]
        if not capacity.allowed_hosts(tenant)[at]:
            return float("inf")
        total += float(capacity.costs(tenant)[at])
        capacity.place(tenant, at)
    return total


@given(st.integers(0, 10**6), st.sampled_from([1.0, -1.0]))
@settings(max_examples=60)
def test_a_small_plan_is_the_best_there_is(seed: int, spread: float) -> None:
    rules = Rules(keep_free=0.05, may_displace=False, weights=Weights(spread=spread))
    made, leaving = random_fleet(seed, 4, 9, full=0.15)
    leaving = leaving[:5]
    found = place(made, leaving, rules)
    names = [one.name for one in made.places]
    best = min(
        (cost(made, leaving, where, rules) for where in product(names, repeat=len(leaving))),
        default=0.0,
    )
    if best == float("inf"):
        assert found.left
        return
    assert not found.left
    got = targets(found)
    assert cost(made, leaving, [got[one.name] for one in leaving], rules) <= best + 1e-9


@given(st.integers(0, 10**6), st.integers(2, 30), st.floats(0.2, 0.95), st.booleans())
@settings(max_examples=80)
def test_no_placement_breaks_a_hard_rule(
    seed: int, hosts: int, full: float, displace: bool
) -> None:
    rules = Rules(keep_free=0.05, may_displace=displace)
    made, leaving = random_fleet(seed, hosts, hosts * 8, full=full)
    found = place(made, leaving, rules)
    assert broken(made, found, rules) == []
    asked = {one.name for one in leaving}
    assert {one.tenant.name for one in found.going if not one.displaced} | {
        one.tenant.name for one in found.left
    } == asked
    assert all(one.tenant.name not in asked for one in found.going if one.displaced)
    assert len(targets(found)) == len(found.going)
    for left in found.left:
        assert left.why
        assert left.hint
