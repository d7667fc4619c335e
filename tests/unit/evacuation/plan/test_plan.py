"""Room for images on targets: of all guests that go there together."""

import asyncio
import random
from collections import Counter
from types import MappingProxyType
from typing import Any

import pytest

from tests.support.fleets import fleet, guest, host
from tests.support.sights import by, vm
from vmckpt.evacuation.plan import plan as plans
from vmckpt.evacuation.plan import planner
from vmckpt.evacuation.plan.inventory import Known, TravelMethod
from vmckpt.evacuation.plan.placement import Assignment
from vmckpt.evacuation.plan.plan import Checked, Checks
from vmckpt.evacuation.state import EvacuationTerms
from vmckpt.model.disk import Room
from vmckpt.model.events import Caller
from vmckpt.protection import relocate_standby
from vmckpt.protection.request import Protected
from vmckpt.units import GIB, Bytes, Seconds

_TERMS = EvacuationTerms()


def room(needed: float, free: float, device: str = "8:1") -> Room:
    """In GiB."""
    return Room(device=device, folder="/images", free=Bytes(int(free * GIB)),
                needed=Bytes(int(needed * GIB)), grown=Bytes(int(needed * GIB)))  # fmt: skip


def checked(*rooms: Room) -> Checked:
    return Checked(policy="maintenance", mode="pre-copy", rooms=rooms)


def goes(name: str, target: str) -> Assignment:
    return Assignment(tenant=guest(name, "alpha"), target=target, why="")


def test_who_comes_after_the_room_is_gone_is_refused_and_it_is_said_why() -> None:
    going = [goes(name, "beta") for name in ("a", "b", "c")]
    sizes = {"a": 4.0, "b": 5.0, "c": 3.0}
    checks = {(name, "beta"): checked(room(size, 8)) for name, size in sizes.items()}
    found = plans.crowded(going, checks)
    assert set(found) == {("b", "beta")}
    (against,) = found["b", "beta"].blockers
    assert against.text == (
        "5.0 GiB needed in /images, 8.0 GiB free, which the images of other guests take that go"
        " there"
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


async def test_a_standby_that_is_made_anew_takes_room_beside_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three of them had room there, each alone: the last one was refused when its turn came."""
    found = Protected(
        guest="a", primary="gamma", backup="beta", session="", job=None, automatic=True,
        findings=(), took=Seconds(0.0), status=None, room=room(3, 8),
    )  # fmt: skip

    async def check(*_: object) -> Protected:
        return found

    monkeypatch.setattr(relocate_standby, "require_relocatable", check)
    monkeypatch.setattr(planner, "another", lambda *_: None)
    scope: Any = None
    caller = Caller(emit=lambda _: None, warn=lambda _: None, stop=asyncio.Event())
    checks = {}
    for name in ("a", "b", "c"):
        known = Known(name=name, guest=vm(name), host="alpha", policy=by(), way=TravelMethod.ANEW)
        checks[name, "beta"] = await planner._standing(scope, known, "beta", caller)
    refused = plans.crowded([goes(name, "beta") for name in ("a", "b", "c")], checks)
    assert set(refused) == {("c", "beta")}
