"""A fork that is to run beside its original: its definition, its MACs and its base images."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree as ET

import pytest

from tests.support.snapshots import FACTS, PUBLIC
from vmckpt.errors import BadInput
from vmckpt.hypervisor import domains
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.disk import StorePlace
from vmckpt.model.host import Host
from vmckpt.snapshot.request import RestoreRequest
from vmckpt.snapshot.restore import harmless_elements, preflight, restore, xml_safety
from vmckpt.snapshot.restore.restore import Opened
from vmckpt.snapshot.restore.xml_safety import Here
from vmckpt.store.format.metadata import Contents, DiskMake
from vmckpt.store.format.private_part import Private

UUID = "c7a5fdbd-edaf-9455-926a-d65c16db1809"
CHANNEL = (
    "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel></devices>"
)
XML = f"""<domain type='kvm'><name>web1</name><uuid>{UUID}</uuid><devices>
<disk type='file' device='disk'><driver name='qemu' type='qcow2'/>
<source file='/srv/vm/web1.qcow2'/><target dev='vda' bus='virtio'/>
<backingStore type='file'><format type='qcow2'/><source file='/srv/vm/debian.qcow2'/></backingStore>
</disk>
<serial type='tcp'><source mode='bind' host='0.0.0.0' service='4555'/><protocol type='raw'/>
<target port='0'/></serial><graphics type='vnc' port='5905' autoport='no' listen='0.0.0.0'/>
<vsock model='virtio'><cid auto='no' address='42'/></vsock>
<interface type='vhostuser'><mac address='52:54:00:00:00:01'/>
<source type='unix' path='/run/vhost1' mode='client'/><model type='virtio'/></interface>
<pstore backend='acpi-erst'><path>/var/lib/p</path><size unit='KiB'>16</size></pstore>
</devices></domain>"""
FORK = RestoreRequest(snapshot="s-1", fork="web1-test")
DISK = DiskMake(target="vda", format="qcow2", size=1, options="")


def opened(xml: str = XML, *, memory: bool = True) -> Opened:
    facts = replace(FACTS, domain_xml=xml, disks=(DISK,))
    contents = Contents.MEMORY if memory else Contents.DISKS
    return Opened(
        store=StorePlace(name="near", url="/x"), public=replace(PUBLIC, contents=contents),
        private=Private(facts=facts, chunks=[], regions=(), files={}), data_key=None,
        trusted=frozenset(),
    )  # fmt: skip


def test_a_fork_has_no_port_socket_or_address_of_its_original() -> None:
    plan = restore.planned(opened(), FORK)
    for taken in ("4555", "5905", "'42'", "/run/vhost1", "/var/lib/p<", "52:54:00:00:00:01"):
        assert taken not in plan.xml.replace('"', "'")
    assert plan.warnings == (
        "in the fork, serial port 0 is a pseudo-terminal; 0.0.0.0:4555 (tcp) stays with the"
        " original",
        "in the fork, network card 0 is not connected; vhostuser /run/vhost1 stays with the"
        " original",
    )
    back = restore.planned(opened(), RestoreRequest(snapshot="s-1"))
    assert "4555" in back.xml, "the original's own place keeps all of it"


@pytest.mark.parametrize(
    ("xml", "request_", "memory", "why"),
    [
        (XML, replace(FORK, link_up=True), True, "the guest has no guest agent"),
        (XML.replace("</devices>", CHANNEL), replace(FORK, link_up=True), True, None),
        (XML.replace("</devices>", CHANNEL), replace(FORK, link_up=True, paused=True), True,
         "a paused fork has the MAC addresses of its original"),
        (XML, replace(FORK, link_up=True), False, None),
        (XML, FORK, True, None),
    ],
)  # fmt: skip
def test_links_come_up_only_with_macs_of_the_forks_own(
    xml: str, request_: RestoreRequest, memory: bool, why: str | None
) -> None:
    snapshot = opened(xml, memory=memory)
    if why is not None:
        with pytest.raises(BadInput, match=why) as caught:
            restore.planned(snapshot, request_)
        assert "virsh start web1-test" in str(caught.value)
        return
    plan = restore.planned(snapshot, request_)
    link = ET.fromstring(plan.xml).find("devices/interface/link")
    up = restore.links_up_at_once(request_, snapshot.public)
    assert up == (request_.link_up and not memory)
    assert link is not None
    assert link.get("state") == "down"  # the vhost-user card is not connected to anything


def test_the_stored_definition_has_the_links_as_they_are() -> None:
    snapshot = opened(XML.replace("vhostuser", "bridge").replace("</devices>", CHANNEL))
    request = replace(FORK, link_up=True)
    plan = restore.planned(snapshot, request)
    work = restore._Restoring.__new__(restore._Restoring)
    work._request, work._hook = request, None
    for hook, down, up in ((None, "", True), (9, "", False), (None, "no agent", False)):
        work._hook = hook
        done = cast("Any", SimpleNamespace(links_down=down, runs=True))
        assert ('state="up"' in work.defined(plan, done).xml.replace("'", '"')) is up


@pytest.mark.parametrize(
    ("storage", "unknown", "trust", "why"),
    [
        (("/srv/vm",), None, False, ""),
        (("/srv/other",), None, False, "it is outside the storage directories of beta"),
        (("/srv/other",), None, True, ""),
        (("/srv/vm",), "gamma", False, "gamma does not answer, and may use it as a disk"),
    ],
)
async def test_a_base_image_must_be_where_the_guest_may_read(
    monkeypatch: pytest.MonkeyPatch, storage: tuple[str, ...], unknown: str | None, trust: bool,
    why: str,
) -> None:  # fmt: skip
    async def inspect(*_: object) -> None:
        return None

    monkeypatch.setattr(domains, "inspect_guest", inspect)
    host = Host(name="beta", uri="test:///default", storage=storage)
    there = cast("Hypervisor", SimpleNamespace(host=host))
    snapshot = opened()
    found = await preflight.usable_bases(
        there, snapshot.public, snapshot.private, replace(FORK, trust_definition=trust), unknown
    )
    assert found == {"vda": ("/srv/vm/debian.qcow2", "qcow2", why)}


def test_what_a_fork_gets_of_its_own_is_harmless() -> None:
    """Elements that the original has on the host are allowed; a fork's must be in any case."""
    request = replace(FORK, trust_definition=False)
    snapshot = opened(XML.replace(
        "</devices>",
        "<redirdev bus='usb' type='tcp'><source mode='connect' host='h' service='4000'/></redirdev>"
        "</devices>",
    ))  # fmt: skip
    plan = restore.planned(snapshot, request)
    root = ET.fromstring(plan.xml)
    assert list(harmless_elements.unknown(root, but=frozenset())) == []
    here = Here(host="beta", definition=None, storage=("/srv/vm",))
    assert xml_safety.unsafe_references(plan.xml, plan.images, (DISK,), here) == ()
    pstore = snapshot.private.facts.domain_xml
    (reason,) = [
        one for one in xml_safety.unsafe_references(pstore, plan.images, (DISK,), here)
        if "pstore" in one
    ]  # fmt: skip
    assert "/var/lib/p" in reason, "the original's file is not one that any guest may have"
