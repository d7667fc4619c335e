"""Room on hosts while a plan is made: what is taken, who may go where, and at what price."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fleets import GIB, OFF, fleet, guest, host, needs, random_fleet
from vmckpt.evacuation.plan.capacity import CapacityModel, lacks
from vmckpt.evacuation.plan.fleet import Fleet, Rules, Tenant, Weights

RULES = Rules(keep_free=0.0)


def model(made: Fleet, rules: Rules = RULES) -> CapacityModel:
    return CapacityModel(made.places, made.tenants, rules)


@given(st.integers(0, 10**6), st.integers(2, 12))
@settings(max_examples=40)
def test_who_may_not_go_somewhere_is_told_why_and_nobody_else_is(seed: int, hosts: int) -> None:
    made, leaving = random_fleet(seed, hosts, hosts * 8, full=0.9)
    capacity = model(made, Rules(keep_free=0.05))
    for tenant in leaving:
        allowed = capacity.allowed_hosts(tenant)
        for at in range(hosts):
            assert bool(allowed[at]) is (capacity.reasons_against(tenant, at) is None)
            assert (capacity.shortage(tenant, at) <= 1e-9) or not allowed[at]
        assert (capacity.least(tenant) < float("inf")) or not allowed.any()


@pytest.mark.parametrize(
    ("tenant", "why"),
    [
        (guest("x", "b"), "the guest is already there"),
        (guest("x", "a", 9), "lacks 1.0 GiB of memory"),
        (guest("x", "a", cpus=65.0), "lacks 3 cores"),
        (guest("x", "a", apart=frozenset({"db"})), "another guest of group db is there"),
        (guest("x", "a", needs=needs(machine="pc-9")), "no machine type pc-9"),
        (guest("x", "a"), None),
    ],
)
def test_the_reason_is_said_in_words(tenant: Tenant, why: str | None) -> None:
    there = guest("y", "b", 2, apart=frozenset({"db"}))
    capacity = model(fleet([OFF, host("b", 10)], there))

    assert capacity.reasons_against(tenant, 1) == why


def test_a_reason_without_the_amount_is_the_same_for_all_hosts() -> None:
    capacity = model(fleet([OFF, host("b", 8), host("c", 9), host("d", 64)]))
    big, many = guest("x", "a", 10), guest("x", "a", cpus=65.0)

    assert [capacity.reasons_against(big, at, exact=False) for at in (1, 2, 3)] == [
        "too little memory", "too little memory", None,
    ]  # fmt: skip
    assert capacity.reasons_against(many, 3, exact=False) == "too little CPU"


def test_a_closed_host_takes_nobody() -> None:
    capacity = model(fleet([OFF, host("b")]))

    assert capacity.reasons_against(guest("x", "b"), 0) == "it is emptied"
    assert list(capacity.allowed_hosts(guest("x", "b"))) == [False, False]


def test_who_leaves_gives_back_all_that_it_took() -> None:
    apart = frozenset({"db"})
    one, other = guest("x", "a", 4, apart=apart), guest("y", "a", 60, apart=apart)
    capacity = model(fleet([host("a"), host("b")]))
    assert capacity.allowed_hosts(other)[1]
    capacity.place(one, 1)
    assert not capacity.allowed_hosts(other)[1]
    assert (float(capacity.used[1]), float(capacity.cpus_used[1])) == (4 * GIB, 2.0)
    capacity.remove(one, 1)

    assert capacity.allowed_hosts(other)[1]
    assert (float(capacity.used[1]), float(capacity.cpus_used[1])) == (0.0, 0.0)
    assert capacity.alike(0) == capacity.alike(1)
    capacity.place(one, 1)
    assert capacity.alike(0) != capacity.alike(1)


def test_emptier_hosts_cost_less_or_more_as_the_weights_say() -> None:
    made = fleet([OFF, host("b"), host("c")], guest("there", "b", 16))
    spread = model(made).costs(guest("x", "a"))
    packed = model(made, Rules(keep_free=0.0, weights=Weights(spread=-1.0))).costs(guest("x", "a"))

    assert spread[1] > spread[2]
    assert packed[1] < packed[2]


def test_a_label_that_is_preferred_and_storage_of_its_host_make_another_one_cheaper() -> None:
    places = [host("a"), host("b", labels={"rack": "1"}), host("c", storage=frozenset())]
    capacity = model(fleet(places))
    plain = capacity.costs(guest("x", "a"))
    likes = capacity.costs(guest("x", "a", prefers=frozenset({("rack", "1")})))

    assert plain[2] - plain[1] == pytest.approx(Weights().stay_near)
    assert likes[2] - likes[1] == pytest.approx(Weights().stay_near + Weights().prefer)


def test_a_move_gains_by_what_loads_become_more_equal() -> None:
    made = fleet([host("a"), host("b")], guest("x", "a", 16), guest("y", "a", 16))
    gains = model(made).gains(made.tenants[0])

    assert gains[1] == pytest.approx(0.5**2 - 2 * 0.25**2)


def test_what_a_host_lacks_counts_however_empty_it_is() -> None:
    place = host("b", labels={"rack": "1"})

    assert lacks(needs(only=frozenset({"c", "a"})), place) == "the guest can move only to a, c"
    assert lacks(needs(networks=frozenset({"br1", "br0"})), place) == "no network br1"
    assert lacks(needs(labels=frozenset({("rack", "2")})), place) == "not labelled rack=2"
    assert lacks(needs(labels=frozenset({("rack", "1")}), cpu="v1"), place) is None
