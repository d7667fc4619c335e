"""The hosts and guests of an inventory, and labels."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.two_copies import HOSTS, INVENTORY, ONE, TWICE, TWO, WEB, Found, asked
from vmckpt.app import fleet
from vmckpt.errors import BadInput, GuestLocked
from vmckpt.hypervisor import domains
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.inventory import Inventory
from vmckpt.model.guest import GuestJob, GuestState
from vmckpt.model.host import Host
from vmckpt.units import Seconds


async def test_hosts_are_asked_again_before_a_guest_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = asked(monkeypatch, TWO, TWO, TWO, ONE, ONE)
    assert await fleet.copies(INVENTORY, within=Seconds(3.0)) == (TWICE,)
    assert limits == [3.0, 3.0]
    assert await fleet.copies(INVENTORY) == ()  # it had moved
    assert await fleet.copies(INVENTORY) == ()
    assert len(limits) == 5


async def test_a_host_that_is_away_is_told_with_why() -> None:
    away = Host(name="alpha", uri="qemu+tcp://127.0.0.1:1/system")
    known = Inventory(path=Path("hosts.yaml"), hosts={"alpha": away}, observer=None)
    (view,) = await fleet.hosts(known)
    assert (view.host, view.facts, bool(view.error)) == (away, None, True)
    found, errors = await fleet.guests(known)
    assert (found, list(errors)) == ([], ["alpha"])


@pytest.mark.parametrize(
    ("found", "kind", "why"),
    [
        (TWO, GuestLocked, "guest web1 is on alpha and beta: it is being migrated"),
        (
            [(HOSTS["beta"], replace(WEB, job=GuestJob.OUTGOING))],
            GuestLocked,
            "guest web1 on beta is locked by a job",
        ),
        ([], BadInput, "no guest is named web1"),
        ([*ONE, (HOSTS["alpha"], replace(WEB, uuid="u-2"))], BadInput, "2 guests are named web1"),
    ],
)
async def test_a_guest_that_moves_or_is_not_clear_gets_no_label(
    monkeypatch: pytest.MonkeyPatch, found: Found, kind: type[Exception], why: str
) -> None:
    asked(monkeypatch, found)
    with pytest.raises(kind, match=why):
        await fleet.label(INVENTORY, "web1", {"tier": "web"})


async def test_labels_are_changed_where_the_guest_runs_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    labelled = replace(WEB, labels={"tier": "web", "owner": "shop"})
    off = replace(labelled, state=GuestState.SHUT_OFF, labels={})
    asked(monkeypatch, [(HOSTS["alpha"], off), (HOSTS["beta"], labelled)])
    written: list[tuple[str, str, Mapping[str, str]]] = []

    async def set_labels(at: Hypervisor, uuid: str, labels: Mapping[str, str]) -> None:
        written.append((at.host.name, uuid, labels))

    monkeypatch.setattr(domains, "set_labels", set_labels)
    now = await fleet.label(INVENTORY, "web1", {"tier": "db", "owner": None})
    assert now == {"tier": "db"}
    assert written == [("beta", "u-1", now)]


def test_a_misspelt_name_brings_the_likely_one() -> None:
    told = fleet.no_guest(INVENTORY, "wbe1", ONE)
    assert str(told).startswith("no guest 'wbe1' on alpha, beta; did you mean web1?")
