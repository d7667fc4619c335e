"""Protections that only their hosts know, because the journal was lost."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import GUEST
from vmckpt import inventory
from vmckpt.app import fleet, protection
from vmckpt.app.controller import Controller
from vmckpt.errors import BadInput, GuestLocked, VmckptError
from vmckpt.inventory import Inventory
from vmckpt.journal.store import Journal
from vmckpt.model.events import Caller
from vmckpt.protection import active, adopt, agent_client, stop
from vmckpt.protection.adopt import Found
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer
from vmckpt.protection.request import Judge
from vmckpt.protection.stop import Known, StopResult

PRIMARY = {
    "role": "primary", "session": "5e55", "peer": "beta", "moves": False, "has_lease": True,
    "runs": True,
}  # fmt: skip
BACKUP = {**PRIMARY, "role": "backup", "peer": "alpha", "runs": False}
SILENT = {"error": "no answer", "silent": True}
FOUND = Found(session="5e55", primary="alpha", backup="beta", has_lease=True)


def parsed(told: Mapping[str, Mapping[str, Any]]) -> dict[str, ProtectionStatus]:
    return {name: parse_answer(one) for name, one in told.items()}


@pytest.mark.parametrize(
    ("told", "dead"),
    [
        ({"alpha": PRIMARY, "beta": BACKUP}, False),
        ({"alpha": PRIMARY}, False),
        ({"alpha": PRIMARY, "beta": SILENT}, False),
        ({"beta": BACKUP}, False),
        ({"alpha": SILENT, "beta": BACKUP}, True),
        ({"alpha": PRIMARY, "beta": BACKUP, "gamma": SILENT}, False),
    ],
)
def test_what_hosts_say_is_a_protection(told: Mapping[str, Mapping[str, Any]], dead: bool) -> None:
    assert adopt.decide("web1", parsed(told), dead=dead) == FOUND


@pytest.mark.parametrize(
    ("told", "kind", "why"),
    [
        ({}, BadInput, "web1 is not protected; run vmckpt status"),
        ({"alpha": {"role": None, "runs": True}}, BadInput, "web1 is not protected"),
        ({"alpha": SILENT}, BadInput, "web1 is not protected; alpha cannot be queried"),
        (
            {"alpha": {**PRIMARY, "moves": True}},
            GuestLocked,
            "is being migrated in mode checkpoint",
        ),
        (
            {"alpha": {key: told for key, told in PRIMARY.items() if key != "moves"}},
            GuestLocked,
            "or was protected by an older release",
        ),
        (
            {"alpha": PRIMARY, "beta": {**BACKUP, "session": "other"}},
            GuestLocked,
            "report different",
        ),
        ({"alpha": PRIMARY, "gamma": PRIMARY}, GuestLocked, "alpha and gamma report different"),
        ({"alpha": PRIMARY, "beta": {**BACKUP, "peer": "gamma"}}, GuestLocked, "report different"),
        # The standby may be all that is left of it.
        (
            {"alpha": SILENT, "beta": BACKUP},
            GuestLocked,
            "may be running on alpha, which cannot be queried",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    told: Mapping[str, Mapping[str, Any]], kind: type[VmckptError], why: str
) -> None:
    with pytest.raises(kind, match=why):
        adopt.decide("web1", parsed(told), dead=False)


class World:
    """Two hosts that have a protection of web1; its journal is lost."""

    def __init__(self) -> None:
        self.told: dict[str, Mapping[str, Any]] = {"alpha": PRIMARY, "beta": BACKUP}
        self.warned: list[str] = []
        self.ended: list[Known] = []
        text = "hosts: {alpha: {uri: 'qemu:///system'}, beta: {uri: 'qemu+tls://beta/system'}}\n"
        text += "lease: postgresql://vm@witness/vm\n"
        self.inventory = inventory.parse(text, Path("hosts.yaml"))
        caller = Caller(emit=lambda _: None, warn=self.warned.append, stop=asyncio.Event())
        self.acting = Controller(inventory=self.inventory, caller=caller)

    async def guests(self, _: Inventory) -> tuple[list[Any], Mapping[str, str]]:
        host = self.inventory.host("alpha")
        return [(host, GUEST)], {}

    async def both(self, *_: object) -> Mapping[str, ProtectionStatus]:
        return parsed(self.told)

    async def end(self, known: Known, _: Caller, **__: object) -> StopResult:
        self.ended.append(known)
        raise BadInput("far enough")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path))
    monkeypatch.setattr(fleet, "guests", made.guests)
    monkeypatch.setattr(agent_client, "both", made.both)
    monkeypatch.setattr(stop, "unprotect", made.end)
    monkeypatch.setattr(stop, "failover", made.end)
    return made


async def test_it_is_written_down_anew_and_ended_like_any_other(world: World) -> None:
    with pytest.raises(BadInput, match="web1 is not protected"):
        await protection.unprotect(world.acting, "web1")
    with pytest.raises(BadInput, match="far enough"):
        await protection.unprotect(world.acting, "web1", lost_journal=True)
    (known,) = world.ended
    assert (known.primary.name, known.backup.name, known.session) == ("alpha", "beta", "5e55")
    assert (known.lease, known.watched) == ("postgresql://vm@witness/vm", False)
    assert "the journal has no record of web1's protection" in world.warned[0]
    with Journal() as journal:
        # Its agents go on with it, and the next controller may end it.
        (operation,) = journal.operations(active=True)
        assert [one.id for one in journal.delegated_to_agents()] == [operation.id]
        assert operation.detail["judge"] == Judge.LEASE
        journal.take_over(operation)
    # Asked again, it is the journal's: hosts are not asked.
    world.told = {}
    with pytest.raises(BadInput, match="far enough"):
        await protection.unprotect(world.acting, "web1", lost_journal=True)
    assert world.ended[1].operation.id == operation.id


async def test_a_standby_runs_by_a_persons_word_though_the_journal_is_lost(world: World) -> None:
    world.told = {"alpha": SILENT, "beta": {**BACKUP, "has_lease": False}}
    with pytest.raises(GuestLocked, match="failover web1 --host-is-off --lost-journal"):
        await protection.unprotect(world.acting, "web1", lost_journal=True)
    with pytest.raises(BadInput, match="is not protected"):
        await protection.failover(world.acting, "web1", dead=True)
    with pytest.raises(BadInput, match="far enough"):
        await protection.failover(world.acting, "web1", dead=True, lost_journal=True)
    (known,) = world.ended
    assert (known.backup.name, known.lease) == ("beta", None)
    (operation,) = active.active()
    assert operation.detail["judge"] == Judge.PERSON
