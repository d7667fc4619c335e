"""All hosts are asked at once, and what cannot be known is left out."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.support.builders import HOST, host_facts
from tests.support.sights import vm
from vmckpt.errors import HostUnreachable, InventoryError, RemoteError
from vmckpt.evacuation.plan import inventory
from vmckpt.evacuation.plan.gather import Hosts
from vmckpt.evacuation.plan.inventory import Answers
from vmckpt.hypervisor import domains, same_host
from vmckpt.hypervisor import host_facts as hypervisor_facts
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.guest import Guest
from vmckpt.model.host import HostFacts
from vmckpt.model.same_host import SameUuid
from vmckpt.remote import probe
from vmckpt.remote.ssh import Remote

HOSTS = tuple(replace(HOST, name=name) for name in ("alpha", "beta", "gamma"))
GUESTS = {"alpha": [vm("a"), vm("b")], "beta": [vm("c", cpu_xml="<cpu>other</cpu>")], "gamma": []}


class Fleet:
    """What the hosts say."""

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.refused: set[tuple[str, str]] = set()
        """Hosts and kinds of CPU that do not fit there."""
        self.asked: list[tuple[str, str]] = []
        self.compared: list[tuple[str, str, tuple[str, ...]]] = []

    async def host_facts(self, one: Hypervisor) -> HostFacts:
        if one.host.name in self.silent:
            raise HostUnreachable("no route", host=one.host.name)
        return host_facts(one.host.name)

    async def all_guests(self, one: Hypervisor) -> Sequence[Guest]:
        return GUESTS[one.host.name]

    async def cpu_fits(self, one: Hypervisor, guest: Guest) -> bool:
        self.asked.append((one.host.name, inventory.cpu(guest)))
        return self.asked[-1] not in self.refused

    async def links(self, remote: Remote) -> frozenset[str]:
        if remote.host.name in self.silent:
            raise RemoteError("no ssh")
        return frozenset({"lo", "br0"})

    async def same_files(self, here: Remote, there: Remote, files: list[str]) -> dict[str, bool]:
        self.compared.append((here.host.name, there.host.name, tuple(files)))
        return dict.fromkeys(files, True)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    made = Fleet()
    monkeypatch.setattr(hypervisor_facts, "host_facts", made.host_facts)
    monkeypatch.setattr(hypervisor_facts, "cpu_fits", made.cpu_fits)
    monkeypatch.setattr(domains, "all_guests", made.all_guests)
    monkeypatch.setattr(probe, "links", made.links)
    monkeypatch.setattr(probe, "same_files", made.same_files)
    return made


async def looked(*sources: str, hosts: Sequence[object] = HOSTS) -> Answers:
    async with Hosts(hosts) as entered:  # type: ignore[arg-type]
        return await entered.look(sources, {"gamma": "new DIMMs"}, {})


async def test_of_hosts_that_answer_all_is_told(fleet: Fleet) -> None:
    found = await looked("alpha")

    assert [one.host.name for one in found.looks] == ["alpha", "beta", "gamma"]
    assert [len(one.guests) for one in found.looks] == [2, 1, 0]
    assert found.closed == {"gamma": "new DIMMs"}
    assert found.same["alpha", "beta"] == {"/srv/a.raw": True, "/srv/b.raw": True}
    assert {(here, there) for here, there, _ in fleet.compared} == {
        ("alpha", "beta"), ("alpha", "gamma"),
    }  # fmt: skip


async def test_each_kind_of_cpu_is_asked_for_once_at_each_host(fleet: Fleet) -> None:
    kinds = {inventory.cpu(one) for guests in GUESTS.values() for one in guests}
    fleet.refused = {("gamma", inventory.cpu(vm("c", cpu_xml="<cpu>other</cpu>")))}
    found = await looked("alpha")

    assert len(kinds) == 2
    assert len(fleet.asked) == len(set(fleet.asked)) == 3 * len(kinds)
    assert found.fits["beta"] == frozenset(kinds)
    assert len(found.fits["gamma"]) == 1


async def test_a_host_that_is_silent_is_named_and_keeps_nobody_waiting(fleet: Fleet) -> None:
    fleet.silent = {"beta"}
    found = await looked("alpha", "beta")

    assert [one.error for one in found.looks] == [None, "no route", None]
    assert "beta" not in found.fits
    assert found.same["alpha", "beta"] == {}
    assert ("alpha", "gamma") in {(here, there) for here, there, _ in fleet.compared}


async def test_between_hosts_without_ssh_nothing_is_known_of_files(fleet: Fleet) -> None:
    bare = [replace(one, ssh=None) if one.name == "beta" else one for one in HOSTS]
    found = await looked("alpha", hosts=bare)

    assert found.looks[1].links is None
    assert found.same["alpha", "beta"] == {}
    assert [there for _, there, _ in fleet.compared] == ["gamma"]


async def test_nobody_else_uses_a_login_meanwhile_and_it_is_kept_for_the_next() -> None:
    async with Hosts((*HOSTS, replace(HOST, name="bare", ssh=None))) as hosts:
        async with hosts.logins("alpha", "bare") as none:
            assert none is None
        async with hosts.logins("alpha", "beta") as first, hosts.logins("alpha", "beta") as other:
            assert first is not None
            assert other is not None
            assert not {*map(id, first)} & {*map(id, other)}
            assert [one.host.name for one in first] == ["alpha", "beta"]
        await asyncio.sleep(0)
        async with hosts.logins("beta", "alpha") as again:
            assert again is not None
            assert {*map(id, again)} <= {*map(id, first), *map(id, other)}


@pytest.mark.parametrize("one", [True, None])
async def test_one_host_under_two_names_is_no_plan(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, one: bool | None
) -> None:
    """Its memory was counted twice, and its guests seemed to be moving already."""
    pair = SameUuid(first="alpha", second="gamma", one=one, why="x")

    async def among(hosts: Sequence[Hypervisor]) -> tuple[SameUuid, ...]:
        return (pair,) if [at.host.name for at in hosts] == ["alpha", "gamma"] else ()

    async def facts(at: Hypervisor) -> HostFacts:
        return host_facts("beta" if at.host.name == "beta" else "alpha")

    monkeypatch.setattr(same_host, "among", among)
    monkeypatch.setattr(hypervisor_facts, "host_facts", facts)
    async with Hosts(HOSTS) as hosts:
        with pytest.raises(InventoryError, match="alpha and gamma are one host"):
            await hosts.look(["alpha"], {}, {})
