"""What of libvirt a waiting standby needs, by libvirt's test driver."""

from collections.abc import Iterator
from typing import Any

import libvirt
import pytest

from tests.support.libvirt_host import GUEST, UUID
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import standby_domain
from vmckpt.hypervisor.qmp import QmpMonitor

HERE: Any = {"host": "beta", "uri": "test:///default"}


@pytest.fixture
def beta(monkeypatch: pytest.MonkeyPatch) -> Iterator[libvirt.virConnect]:
    """The host that all of this process share, with nothing of ours on it afterwards."""
    made = libvirt.open("test:///default")
    create = libvirt.virConnect.createXML

    def paused(connection: libvirt.virConnect, xml: str, flags: int) -> libvirt.virDomain:
        """This driver starts no guest so by itself."""
        assert flags == libvirt.VIR_DOMAIN_START_PAUSED
        domain = create(connection, xml, 0)
        domain.suspend()
        return domain

    monkeypatch.setattr(libvirt.virConnect, "createXML", paused)
    yield made
    for domain in made.listAllDomains():
        if domain.UUIDString() == UUID:
            if domain.isPersistent():
                domain.undefine()
            if domain.isActive():
                domain.destroy()
    made.close()


def test_a_standby_is_started_still_and_stored_nowhere(beta: libvirt.virConnect) -> None:
    standby_domain.create_paused(GUEST, **HERE)
    domain = beta.lookupByUUIDString(UUID)
    assert domain.state()[0] == libvirt.VIR_DOMAIN_PAUSED
    assert not domain.isPersistent()
    assert "web1" in standby_domain.names(**HERE)
    with pytest.raises(HypervisorError, match="beta: starting the standby"):
        standby_domain.create_paused(GUEST, **HERE)


@pytest.mark.parametrize("autostart", [False, True])
def test_a_definition_is_stored_and_told_with_whether_it_starts_with_its_host(
    beta: libvirt.virConnect, autostart: bool
) -> None:
    standby_domain.create_paused(GUEST, **HERE)
    with QmpMonitor(UUID, **HERE) as monitor:
        assert standby_domain.stored(monitor) is None
        standby_domain.define(GUEST, autostart=autostart, **HERE)
        found = standby_domain.stored(monitor)
    assert found is not None
    assert ("<name>web1</name>" in found[0], found[1]) == (True, autostart)
    assert beta.lookupByUUIDString(UUID).isActive()


def test_a_definition_is_forgotten_and_what_is_outside_it_is_kept(
    beta: libvirt.virConnect, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(libvirt.virDomain, "undefineFlags", lambda _, flags: asked.append(flags))
    standby_domain.create_paused(GUEST, **HERE)
    with QmpMonitor(UUID, **HERE) as monitor:
        standby_domain.undefine(monitor)
        assert asked == []
        standby_domain.define(GUEST, **HERE)
        standby_domain.undefine(monitor)
    (flags,) = asked
    for kept in (libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM, libvirt.VIR_DOMAIN_UNDEFINE_KEEP_TPM):
        assert flags & kept
    assert not flags & libvirt.VIR_DOMAIN_UNDEFINE_NVRAM
    assert beta.lookupByUUIDString(UUID).isActive()


def test_cards_are_plugged_in_and_the_mark_goes_from_the_running_guest_alone(
    beta: libvirt.virConnect,
) -> None:
    namespace = "http://vmckpt/standby"
    metadata = f"<metadata><v:standby xmlns:v='{namespace}'/></metadata>"
    standby_domain.create_paused(GUEST.replace("</domain>", f"{metadata}</domain>"), **HERE)
    domain = beta.lookupByUUIDString(UUID)
    assert namespace in domain.XMLDesc()
    with QmpMonitor(UUID, **HERE) as monitor:
        standby_domain.forget_mark(monitor, namespace)
        assert namespace not in domain.XMLDesc()
        standby_domain.links_up(monitor, [])
        card = "<interface type='network'><mac address='52:54:00:00:00:01'/></interface>"
        with pytest.raises(HypervisorError, match="bringing up the guest's links"):
            standby_domain.links_up(monitor, [card])
