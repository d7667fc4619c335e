"""Which files a host's guests have for images, as its libvirt tells them."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import libvirt
import pytest

from tests.support.builders import HOST
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import storage
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.storage import User

URI = "test:///default"
HOME = replace(HOST, uri=URI)
POOL = "<pool type='dir'><name>tank</name><target><path>/tank</path></target></pool>"
VOLUME = (
    "<volume><name>b.img</name><capacity>4096</capacity><target><format type='qcow2'/></target>"
    "</volume>"
)
GUEST = """<domain type='test'><name>b</name><memory>1024</memory><os><type>hvm</type></os>
<devices><disk type='volume' device='disk'><driver name='qemu' type='qcow2'/>
<source pool='{pool}' volume='b.img'/><target dev='vda'/></disk>
<disk type='file' device='disk'><source file='/b.raw'/><target dev='vdb'/></disk></devices>
</domain>"""


@pytest.fixture
def connection() -> Iterator[libvirt.virConnect]:
    """libvirt's test driver, which all of this process share."""
    made = libvirt.open(URI)
    pool = made.storagePoolCreateXML(POOL)
    pool.createXML(VOLUME)
    yield made
    for domain in made.listAllDomains():
        if domain.name() == "b":
            domain.undefine()
    pool.destroy()
    made.close()


ITS_OWN = {"/guest/diskimage1": User("test", "raw")}
"""Of the guest that the driver comes with."""


def users(but: str | None = None) -> dict[str, User]:
    async def ask() -> dict[str, User]:
        async with Hypervisor(HOME) as hypervisor:
            if but is not None:
                return dict(await storage.of_others(hypervisor, but))
            return dict(await storage.of_all(hypervisor))

    return asyncio.run(ask())


def test_an_image_by_its_pool_and_volume_is_one(connection: libvirt.virConnect) -> None:
    connection.defineXML(GUEST.format(pool="tank"))
    found = {"/tank/b.img": User("b", "qcow2"), "/b.raw": User("b", "raw")}
    assert users() == {**ITS_OWN, **found}


def test_a_volume_that_is_not_there_keeps_nobody_from_being_seen(
    connection: libvirt.virConnect,
) -> None:
    connection.defineXML(GUEST.format(pool="tnak"))
    assert users() == {**ITS_OWN, "/b.raw": User("b", "raw")}


def test_what_is_in_a_pool_that_is_off_nobody_knows(connection: libvirt.virConnect) -> None:
    """Who asks whether an image may go must be told so; a restore is not kept by it."""
    pool = connection.storagePoolDefineXML(POOL.replace("tank", "closed"))
    connection.defineXML(GUEST.format(pool="closed"))
    try:
        with pytest.raises(HypervisorError):
            users()
        assert users(but="nobody") == {**ITS_OWN, "/b.raw": User("b", "raw")}
    finally:
        pool.undefine()


@pytest.mark.parametrize(("code", "fails"), [("VIR_ERR_NO_DOMAIN", False), ("VIR_ERR_RPC", True)])
def test_only_a_guest_that_went_away_is_passed_over(
    connection: libvirt.virConnect, monkeypatch: pytest.MonkeyPatch, code: str, fails: bool
) -> None:
    """With a connection that broke, nobody would seem to have anything."""
    error = libvirt.libvirtError("it says no")
    monkeypatch.setattr(error, "get_error_code", lambda: getattr(libvirt, code, 39))

    def broken(*_: object) -> str:
        raise error

    monkeypatch.setattr(libvirt.virDomain, "XMLDesc", broken)
    if fails:
        with pytest.raises(HypervisorError):
            users()
    else:
        assert users() == {}


def test_a_definition_gets_the_paths_of_its_volumes(connection: libvirt.virConnect) -> None:
    known = connection.defineXML(GUEST.format(pool="tank")).XMLDesc()
    found = storage.with_volumes_by_path(connection, known)
    disk, other = storage.read_drives(found)
    assert (disk.kind, disk.path, disk.format) == ("file", "/tank/b.img", "qcow2")
    assert (other.kind, other.path) == ("file", "/b.raw")
    assert "pool=" not in found


def test_a_volume_that_is_not_there_stays_one(connection: libvirt.virConnect) -> None:
    known = connection.defineXML(GUEST.format(pool="tnak")).XMLDesc()
    assert "pool='tnak'" in storage.with_volumes_by_path(connection, known)
