"""Guests of a host are found, labelled, defined anew and removed, by libvirt's test driver."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import libvirt
import pytest
import pytest_asyncio

from tests.support import libvirt_host
from tests.support.libvirt_host import GUEST, UUID
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import domains
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.guest import GuestState, Presence
from vmckpt.model.host import Host

OTHER = GUEST.replace("web1", "web2").replace("1111-1111", "2222-2222")


@pytest_asyncio.fixture
async def alpha(tmp_path: Path) -> AsyncIterator[Hypervisor]:
    async with Hypervisor(libvirt_host.host(tmp_path)) as found:
        yield found


async def test_a_guest_is_found_by_its_name_and_its_uuid(alpha: Hypervisor) -> None:
    await domains.define(alpha, OTHER)
    first, second = await domains.all_guests(alpha)
    assert (first.name, first.state) == ("web1", GuestState.RUNNING)
    assert (second.name, second.state) == ("web2", GuestState.SHUT_OFF)
    assert await domains.find_guest(alpha, "web1") == first
    assert await domains.find_guest(alpha, UUID) == first
    for name in ("web3", "\x00"):
        assert await domains.find_guest(alpha, name) is None


async def test_a_guest_named_like_the_uuid_of_another_is_not_taken_for_it(
    alpha: Hypervisor,
) -> None:
    nowhere = UUID.replace("1111-1111", "9999-9999")
    for own, uuid in (("3333-3333", UUID), ("4444-4444", nowhere)):
        named = OTHER.replace("<name>web2</name>", f"<name>{uuid}</name>")
        await domains.define(alpha, named.replace("2222-2222", own))
    found = await domains.find_guest(alpha, UUID)
    assert found is not None
    assert found.name == "web1"
    await domains.end(alpha, UUID)
    assert (await domains.presence(alpha, UUID)).state is GuestState.SHUT_OFF
    assert await domains.find_guest(alpha, nowhere) is None
    assert await domains.presence(alpha, nowhere) == Presence(reachable=True)


async def test_whether_a_guest_is_there_is_an_answer_also_of_a_host_that_is_not(
    alpha: Hypervisor,
) -> None:
    there = await domains.presence(alpha, UUID)
    assert (there.reachable, there.state, there.held) == (True, GuestState.RUNNING, False)
    assert await domains.presence(alpha, "no-such-guest") == Presence(reachable=True)
    async with Hypervisor(Host(name="beta", uri="test:///no/such/file")) as beta:
        assert await domains.presence(beta, UUID) == Presence(reachable=False)


async def test_labels_are_all_that_were_given_last(alpha: Hypervisor) -> None:
    for labels in ({"rack": "1", "tier": "<a>"}, {"rack": "2"}, {}):
        await domains.set_labels(alpha, "web1", labels)
        guest = await domains.find_guest(alpha, "web1")
        assert guest is not None
        assert guest.labels == labels
    with pytest.raises(HypervisorError, match="no guest 'web3' on alpha"):
        await domains.set_labels(alpha, "web3", {})


async def test_one_is_ended_resumed_and_removed_however_often_it_is_asked_for(
    alpha: Hypervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def suspend(connection: libvirt.virConnect) -> None:
        connection.lookupByName("web1").suspend()

    async def state() -> GuestState | None:
        return (await domains.presence(alpha, UUID)).state

    await alpha.execute("pausing it", suspend)
    assert await state() is GuestState.PAUSED
    for _ in range(2):
        await domains.resume(alpha, UUID)
        assert await state() is GuestState.RUNNING
    for _ in range(2):
        await domains.end(alpha, UUID)
        assert await state() is GuestState.SHUT_OFF
    # This driver knows none of the flags.
    monkeypatch.setattr(libvirt.virDomain, "undefineFlags", lambda it, _: it.undefine())
    for _ in range(2):
        await domains.remove(alpha, "web1")
        assert await state() is None


async def test_a_definition_that_somebody_changed_meanwhile_is_left_alone(
    alpha: Hypervisor,
) -> None:
    await domains.end(alpha, UUID)
    found = await domains.stored_definition(alpha, UUID)
    assert found.running is None
    assert "<name>web1</name>" in found.text
    with pytest.raises(HypervisorError, match="has changed in the meantime"):
        await domains.write(alpha, UUID, GUEST, instead_of=found.text + " ")
    larger = found.text.replace("65536", "131072")
    await domains.write(alpha, UUID, larger, instead_of=found.text)
    now = await domains.inspect_guest(alpha, UUID)
    assert now is not None
    assert not now.active
    assert "131072" in (now.stored or "")


async def test_a_definition_is_put_right_only_where_that_is_wanted(alpha: Hypervisor) -> None:
    new = "22222222-2222-4222-8222-222222222222"
    seen: list[str | None] = []

    def wanted(stored: str | None) -> str | None:
        seen.append(stored)
        return None if stored else GUEST.replace(UUID, new).replace("web1", "web2")

    assert await domains.inspect_guest(alpha, new) is None
    assert await domains.put_right(alpha, new, wanted)
    assert not await domains.put_right(alpha, new, wanted)
    assert (seen[0], "web2" in str(seen[1])) == (None, True)


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ([domains._STOPPED_BY_QEMU, (1, 1)], (1, 1)),
        ([domains._STOPPED_BY_QEMU], domains._STOPPED_BY_QEMU),
        ([(3, 1), (1, 1)], (3, 1)),
    ],
)
def test_a_pause_of_an_epoch_is_none_to_be_told(
    monkeypatch: pytest.MonkeyPatch, states: list[tuple[int, int]], told: tuple[int, int]
) -> None:
    monkeypatch.setattr(domains, "_EPOCH_PAUSE", 0.0)
    left = list(states)
    domain: Any = SimpleNamespace(state=lambda: left.pop(0) if len(left) > 1 else left[0])
    assert domains.state_of(domain) == told


def test_only_cables_that_are_out_are_plugged_in() -> None:
    xml = """<domain><devices><interface><mac address='a'/><link state='down'/></interface>
      <interface><mac address='b'/><link state='up'/></interface>
      <interface><mac address='c'/></interface></devices></domain>"""
    told: list[str] = []
    domain = SimpleNamespace(
        XMLDesc=lambda: xml, updateDeviceFlags=lambda card, _: told.append(card)
    )
    caller: Any = SimpleNamespace(on_domain=lambda _, call, **__: call(domain))
    domains.up(caller)
    assert len(told) == 1
    assert 'address="a"' in told[0]
    assert 'state="up"' in told[0]
