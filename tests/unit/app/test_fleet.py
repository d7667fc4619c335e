"""The hosts and guests of an inventory, and labels."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.two_copies import HOSTS, INVENTORY, ONE, TWICE, TWO, WEB, Found, asked
from vmckpt.app import fleet
from vmckpt.errors import BadInput, GuestLocked, InventoryError
from vmckpt.hypervisor import domains, same_host
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.inventory import Inventory
from vmckpt.model.guest import Guest, GuestJob, GuestState
from vmckpt.model.host import Host
from vmckpt.model.same_host import SameUuid
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
    (view,), _ = await fleet.hosts(known)
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


def answering(
    monkeypatch: pytest.MonkeyPatch, found: Mapping[str, list[Guest]], *same: SameUuid
) -> list[list[str]]:
    """Hosts have these guests, and the comparison of hosts finds this; the hosts it is asked of."""
    compared: list[list[str]] = []

    async def all_guests(at: Hypervisor) -> list[Guest]:
        return found[at.host.name]

    async def among(hosts: Sequence[Hypervisor]) -> tuple[SameUuid, ...]:
        compared.append([one.host.name for one in hosts])
        return same if hosts else ()

    monkeypatch.setattr(domains, "all_guests", all_guests)
    monkeypatch.setattr(same_host, "among", among)
    return compared


ONE_HOST = SameUuid(first="alpha", second="beta", one=True)
UNCLEAR = SameUuid(first="alpha", second="beta", one=None, why="x")
CLONES = SameUuid(first="alpha", second="beta", one=False, why="x")


async def test_one_host_under_two_names_is_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both names listed the guest, and the only copy was to be ended as the other copy."""
    answering(monkeypatch, {"alpha": [WEB], "beta": [WEB]}, ONE_HOST)
    listing = await fleet.listing(INVENTORY)

    assert [(host.name, guest) for host, guest in listing.found] == [("alpha", WEB)]
    assert listing.same == (ONE_HOST,)
    assert await fleet.copies(INVENTORY) == ()
    assert await fleet.copies(INVENTORY, listing.found) == ()


@pytest.mark.parametrize(
    ("same", "why"),
    [
        (ONE_HOST, "alpha and beta are one host; nothing was changed; leave alpha or beta out"),
        (UNCLEAR, "it is unknown whether alpha and beta are one host: x"),
    ],
)
async def test_a_guest_is_not_located_on_one_host_with_two_names(
    monkeypatch: pytest.MonkeyPatch, same: SameUuid, why: str
) -> None:
    answering(monkeypatch, {"alpha": [WEB], "beta": [WEB]}, same)
    with pytest.raises(InventoryError, match=why) as caught:
        await fleet.guests(INVENTORY)
    assert "destroy" not in str(caught.value)
    with pytest.raises(InventoryError, match=why):
        await fleet.label(INVENTORY, "web1", {"tier": "web"})


async def test_copies_are_reported_only_on_hosts_that_are_proven_to_be_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = {"alpha": [WEB], "beta": [WEB]}
    answering(monkeypatch, both, CLONES)
    assert await fleet.copies(INVENTORY) == (TWICE,)
    answering(monkeypatch, both)
    assert await fleet.copies(INVENTORY) == (TWICE,)
    answering(monkeypatch, both, UNCLEAR)
    with pytest.raises(InventoryError, match="it is unknown whether"):
        await fleet.copies(INVENTORY)


async def test_only_hosts_with_a_guest_in_common_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = replace(WEB, name="db1", uuid="u-2")
    compared = answering(monkeypatch, {"alpha": [WEB], "beta": [other]})
    await fleet.guests(INVENTORY)
    assert compared == [[]]
    compared = answering(monkeypatch, {"alpha": [WEB], "beta": [other, WEB]})
    await fleet.guests(INVENTORY)
    assert compared == [["alpha", "beta"]]
