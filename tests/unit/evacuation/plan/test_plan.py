"""Room for images on targets: of all guests that go there together."""

import random
from collections import Counter
from types import MappingProxyType

import pytest

from tests.support.fleets import fleet, guest, host
from tests.support.rooms import goes, room
from vmckpt.evacuation.plan import plan as plans
from vmckpt.evacuation.plan.plan import Checked, Checks
from vmckpt.evacuation.state import EvacuationTerms
from vmckpt.model.disk import Room
from vmckpt.units import GIB

_TERMS = EvacuationTerms()


def checked(*rooms: Room) -> Checked:
    return Checked(policy="maintenance", mode="pre-copy", rooms=rooms)


def test_who_comes_after_the_room_is_gone_is_refused_and_it_is_said_why() -> None:
    going = [goes(name, "beta") for name in ("a", "b", "c")]
    sizes = {"a": 4.0, "b": 5.0, "c": 3.0}
    checks = {(name, "beta"): checked(room(size, 8)) for name, size in sizes.items()}
    found = plans.crowded(going, checks)
    assert set(found) == {("b", "beta")}
    (against,) = found["b", "beta"].blockers
    assert against.text == (
        "5.0 GiB needed in /images; 8.0 GiB free, but the images of other guests that move there"
        " need that space"
    )


def test_other_file_systems_and_other_hosts_are_not_full_for_that() -> None:
    going = [goes("a", "beta"), goes("b", "beta"), goes("c", "gamma")]
    checks = {
        ("a", "beta"): checked(room(6, 8)), ("b", "beta"): checked(room(6, 8, "8:2")),
        ("c", "gamma"): checked(room(6, 8)),
    }  # fmt: skip
    assert not plans.crowded(going, checks)


def test_a_guest_that_finds_no_room_beside_others_goes_to_another_host() -> None:
    """As scouting does it, with hosts of which each has room for two."""
    tenants = [guest(f"g{number}", "alpha") for number in range(4)]
    seen = fleet([host("alpha", closed="it is emptied"), host("beta", 640), host("gamma")],
                 *tenants)  # fmt: skip
    asked = frozenset(one.name for one in tenants)
    checks: Checks = MappingProxyType(
        {(one.name, at): checked(room(3, 8)) for one in tenants for at in ("beta", "gamma")}
    )
    found = plans.placed(seen, asked, _TERMS)
    assert Counter(one.target for one in found.going) == {"beta": 4}
    checks = {**checks, **plans.crowded(found.going, checks)}
    found = plans.placed(plans.without(seen, checks), asked, _TERMS)
    assert Counter(one.target for one in found.going) == {"beta": 2, "gamma": 2}
    assert not plans.crowded(found.going, checks)


@pytest.mark.parametrize("seed", range(50))
def test_no_file_system_is_overfilled_by_what_is_let_through(seed: int) -> None:
    dice = random.Random(seed)
    free = {(at, device): dice.uniform(1, 9) for at in ("beta", "gamma") for device in "xy"}
    going = [goes(f"g{number}", dice.choice(("beta", "gamma"))) for number in range(12)]
    checks = {}
    for one in going:
        rooms = [
            room(size, free[one.target, device], device)
            for device in dice.choice(("x", "y", "xy", ""))
            if (size := dice.uniform(0.1, 3)) <= free[one.target, device]
        ]
        checks[one.tenant.name, one.target] = checked(*rooms)
    refused = plans.crowded(going, checks)
    used = Counter[tuple[str, str]]()
    for one in going:
        if (one.tenant.name, one.target) not in refused:
            for taken in checks[one.tenant.name, one.target].rooms:
                used[one.target, taken.device] += taken.needed
    assert all(used[at] <= free[at] * GIB for at in used)
