"""What a manifest says of the guest that was captured."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from vmckpt.agent.orders import CreateOrder
from vmckpt.agent.snapshot import describe
from vmckpt.capture.memory.image import FrozenImage
from vmckpt.model.disk import DiskFacts, StorePlace
from vmckpt.replication.backup import standby_xml
from vmckpt.snapshot.restore import domain_xml as restore_xml
from vmckpt.store.format.chunk_map import Kind
from vmckpt.store.format.metadata import Contents, DiskMake, PrivateFacts, RamBlock
from vmckpt.store.format.private_part import Private, RegionMap
from vmckpt.units import Bytes

ID = "s-aaaaaaaaaaaaaaaa"
XML = """<domain type='kvm'><name>web1</name><uuid>0d6f7a57-be04-4dd1-80ff-c8e5fa28580b</uuid>
  <memory unit='KiB'>8</memory><vcpu>1</vcpu>
  <os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type><loader>/fw.fd</loader></os>
</domain>"""
DISK = DiskFacts(
    name="vda", kind="file", device="disk", format="qcow2", source="/x", size=Bytes(4096)
)
IMAGE = SimpleNamespace(blocks=[SimpleNamespace(name="pc.ram", size=8192)])


@pytest.fixture
def order() -> CreateOrder:
    return CreateOrder(
        guest="0d6f7a57-be04-4dd1-80ff-c8e5fa28580b", uri="", host="alpha",
        store=StorePlace(name="near", url="/x"), state="/state", snapshot=ID, name="nightly",
        by="root", owner="7", memory=True, tags={"a": "b"}, group=None, salt=None, admins=(),
        signer="",
    )  # fmt: skip


def test_a_guest_that_has_failed_over_is_described_as_it_was_before() -> None:
    other = XML.replace("</os>", "</os><description>-incoming</description>")
    for xml in (XML, other):
        standby = standby_xml.standby(xml, {}, "5e55")
        assert "-incoming" in standby
        made = describe.facts(standby, (), None, agent=False).domain_xml
        assert "commandline" not in made
        assert standby_xml.MARK + "}standby" not in made
        assert describe.facts(made, (), None, agent=False).domain_xml == made
    assert describe.facts(XML, (), None, agent=False).domain_xml == XML


def test_the_base_of_an_overlay_is_recorded() -> None:
    xml = XML.replace(
        "</domain>",
        "<devices><disk type='file'><source file='/x'/><target dev='vda'/></disk>"
        "<disk type='file'><source file='/y'/><target dev='vdb'/></disk></devices></domain>",
    )
    disks = [replace(DISK, base=("/base.qcow2", "qcow2")), replace(DISK, name="vdb")]
    made = describe.facts(xml, disks, None, agent=False).domain_xml
    assert restore_xml.bases(made) == {"vda": ("/base.qcow2", "qcow2")}
    assert describe.facts(made, disks, None, agent=False).domain_xml == made
    assert describe.facts(xml, disks[1:], None, agent=False).domain_xml == xml
    placed = restore_xml.xml_for_replace(made, {"vda": "/new", "vdb": "/y"})
    assert "backingStore" not in placed, "libvirt reads it from the restored image"


def test_no_warning_costs_the_snapshot() -> None:
    told = describe.warnings([f"{n}\t" + "x" * 300 for n in range(80)])
    assert (len(told), {len(one) for one in told}, told[3][:3]) == (64, {255}, "3 x")
    facts = PrivateFacts(
        domain_xml="", cpu_xml=None, boot_files=(), ram=(), disks=(), warnings=told
    )
    assert facts.warnings == told


def test_the_facts_are_of_the_definition_the_disks_and_the_memory() -> None:
    found = describe.facts(XML, [DISK], cast("FrozenImage", IMAGE), agent=True)
    assert (found.domain_xml, found.boot_files) == (XML, ("/fw.fd",))
    assert found.disks == (DiskMake(target="vda", format="qcow2", size=4096, options=""),)
    assert found.ram == (RamBlock(name="pc.ram", size=8192),)
    assert found.agent != {}
    bare = describe.facts(XML, [DISK], None, agent=False)
    assert (bare.ram, bare.agent) == ((), {})


def test_everybody_may_read_how_much_it_is_and_of_what(order: CreateOrder) -> None:
    regions = tuple(
        RegionMap(name=name, kind=kind, size=Bytes(size), map=np.zeros(0, dtype=np.uint32))
        for name, kind, size in (
            ("pc.ram", Kind.RAM, 8192), ("vda", Kind.DISK, 4096), ("vdb", Kind.DISK, 512)
        )
    )  # fmt: skip
    private = Private(
        facts=describe.facts(XML, [], None, agent=False), chunks=[], regions=regions, files={}
    )
    told = describe.public(order, private, made_at=5.0, qemu="7.2.22", parent=None, epoch=3, new=99)
    assert (told.guest, told.machine, told.arch) == ("web1", "pc-q35-7.2", "x86_64")
    assert (told.memory, told.disks, told.new) == (8192, 4608, 99)
    assert (told.contents, told.id, told.tags) == (Contents.MEMORY, ID, {"a": "b"})
    only = describe.public(
        replace(order, memory=False), private, made_at=5.0, qemu="7.2.22", parent=None, epoch=3,
        new=99,
    )  # fmt: skip
    assert only.contents is Contents.DISKS


@pytest.mark.parametrize(("off", "why"), [(True, "is off"), (False, "without memory was")])
def test_without_memory_the_reason_is_told(off: bool, why: str) -> None:
    told = describe.way(None, off=off)
    assert (told["way"], told["pause"]) == ("disks", 0.0)
    assert why in told["why"]
