"""What a guest moves by, and what is looked at before it is placed."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.rooms import goes, room
from tests.support.sights import EMPTY, answers, at, by, vm
from vmckpt import inventory
from vmckpt.evacuation.plan import plan as plans
from vmckpt.evacuation.plan import planner
from vmckpt.evacuation.plan.inventory import Known, TravelMethod
from vmckpt.evacuation.plan.planner import Scope
from vmckpt.journal import location as locations
from vmckpt.model.events import Caller
from vmckpt.model.guest import GuestState
from vmckpt.policy import loader, parse
from vmckpt.protection import relocate_standby
from vmckpt.protection.request import Protected
from vmckpt.units import Seconds


async def test_a_standby_that_is_made_anew_takes_room_beside_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three of them had room there, each alone: the last one was refused when its turn came."""
    found = Protected(
        guest="a", primary="gamma", backup="beta", session="", job=None, automatic=True,
        findings=(), took=Seconds(0.0), status=None, rooms=(room(3, 8),),
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


@pytest.mark.parametrize("others", [(), (vm("a", state=GuestState.SHUT_OFF),)])
async def test_what_a_guest_moves_by_is_not_chosen_by_another_hosts_copy_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, others: tuple[Any, ...]
) -> None:
    monkeypatch.setenv(locations.VARIABLE, str(tmp_path / "journal.db"))
    text = "hosts:\n" + "".join(
        f"  {name}: {{uri: 'test:///default', labels: {{rack: {rack}}}}}\n"
        for name, rack in (("alpha", "r1"), ("beta", "r2"))
    )
    inv = inventory.parse(text, Path("hosts.yaml"))
    keys = "select: {host_labels: {rack: r1}}\nevacuate: {strategy: leave}\n"
    own = parse.parse(f"version: vmckpt/v1\nname: r1-stays\n{keys}", Path("r1.yaml"))
    scope = Scope(inventory=inv, policies=(*loader.load_all(None), own))
    told = answers(
        *(replace(at(name, *found), host=inv.host(name))
          for name, found in (("alpha", (vm("a"),)), ("beta", others)))
    )  # fmt: skip

    class Hosts:
        async def look(self, *_: object) -> Any:
            return told

    hosts: Any = Hosts()
    found = await planner.gather_fleet(hosts, scope, EMPTY)
    (tenant,) = [one for one in found.fleet.tenants if one.host == "alpha"]
    assert tenant.stays == "its policy r1-stays has strategy: leave"
