"""A standby's description, and that of the guest it becomes."""

from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from vmckpt.hypervisor import storage
from vmckpt.replication.backup import standby_xml
from vmckpt.replication.protocol.memory_layout import Dimm

Q = f"{{{standby_xml.QEMU}}}"
IMAGES = {"vda": "/srv/b/web1-vda.qcow2", "vdb": "/srv/b/web1-vdb.raw"}
XML = """
<domain type='kvm' id='7' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>web1</name>
  <uuid>0d6f7a57-be04-4dd1-80ff-c8e5fa28580b</uuid>
  <metadata><v:labels xmlns:v='urn:vmckpt:labels:1'><v:label name='tier'/></v:labels></metadata>
  <memory unit='KiB'>262144</memory>
  <memoryBacking><source type='file'/><access mode='shared'/></memoryBacking>
  <cpu mode='custom'>
    <numa><cell id='0' cpus='0' memory='131072' unit='KiB' memAccess='shared'/>
      <cell id='1' cpus='1' memory='131072' unit='KiB' memAccess='shared'/></numa>
  </cpu>
  <devices>
    <disk type='network' device='disk'>
      <driver name='qemu' type='qcow2' cache='none'/>
      <source protocol='nbd' name='x' index='2'/>
      <backingStore type='file'><source file='/srv/base.qcow2'/></backingStore>
      <target dev='vda' bus='virtio'/><alias name='virtio-disk0'/>
    </disk>
    <disk type='file' device='disk'><source file='/srv/two.raw'/><target dev='vdb'/></disk>
    <disk type='file' device='disk'><source file='/srv/other.raw'/><target dev='vdc'/></disk>
    <disk type='file' device='cdrom'><target dev='sda'/><readonly/></disk>
    <interface type='bridge'><mac address='52:54:00:00:00:01'/><source bridge='br0'/>
      <target dev='vnet3'/><link state='up'/><alias name='net0'/></interface>
    <interface type='direct'><source dev='eth0' mode='bridge'/><target dev='macvtap1'/></interface>
    <interface type='bridge'><source bridge='br1'/><target dev='tap-web1'/></interface>
  </devices>
  <qemu:commandline><qemu:arg value='-msg'/><qemu:arg value='timestamp=on'/></qemu:commandline>
</domain>
"""
SMALL = "<domain type='kvm'><name>tiny</name><devices/></domain>"
MADE = (standby_xml.standby(XML, IMAGES, "5e55"), standby_xml.clean(XML, IMAGES))


def arguments(xml: str) -> list[str | None]:
    return [one.get("value") for one in ET.fromstring(xml).findall(f"{Q}commandline/{Q}arg")]


def test_a_dimm_is_the_guest_s_and_can_be_mapped() -> None:
    one = Dimm(name="dimm3", size=1 << 27, node=1, slot=3, address=0x140000000)
    wanted = (
        '<memory model="dimm" access="shared"><target><size unit="b">134217728</size>'
        '<node>1</node></target><address type="dimm" slot="3" base="0x140000000" /></memory>'
    )
    assert standby_xml.dimm(one, nodes=True) == wanted
    assert "<node>" not in standby_xml.dimm(one, nodes=False)
    named = standby_xml.dimm(replace(one, name="ua-more"), nodes=True)
    assert named == wanted.replace("<target>", '<alias name="ua-more" /><target>')


def test_nodes_are_seen() -> None:
    assert standby_xml.has_nodes(XML)
    assert not standby_xml.has_nodes(SMALL)


def test_dimms_that_the_guest_keeps_to_itself_are_shared_by_the_standby() -> None:
    dimm = "<memory model='dimm' access='private'><target/></memory><memory model='dimm'/>"
    shared = XML.replace("<devices>", f"<devices>{dimm}")
    for xml in (shared, shared.replace("<source type='file'/>", "")):
        made = standby_xml.standby(xml, IMAGES, "5e55", shares_memory=True)
        found = [one.get("access") for one in ET.fromstring(made).findall("devices/memory")]
        assert found == ["shared", None]


@pytest.mark.parametrize(
    "backing",
    [
        "", "<memoryBacking><hugepages/></memoryBacking>",
        "<memoryBacking><source type='file'/></memoryBacking>",
        "<memoryBacking><source type='anonymous'/><access mode='private'/></memoryBacking>",
        "<memoryBacking><access mode='shared'/></memoryBacking>",
    ],
)  # fmt: skip
def test_the_standby_of_a_guest_with_private_memory_shares_its_own(backing: str) -> None:
    xml = XML.replace("<memoryBacking><source type='file'/><access mode='shared'/></memoryBacking>",
                      backing).replace("memAccess='shared'", "memAccess='private'")  # fmt: skip
    made = ET.fromstring(standby_xml.standby(xml, IMAGES, "s-1", shares_memory=True))
    (found,) = made.findall("memoryBacking")
    kept = [node.tag for node in found if node.tag not in ("source", "access")]
    assert kept == (["hugepages"] if "hugepages" in backing else [])
    assert [node.get("type") for node in found.findall("source")] == ["memfd"]
    assert [node.get("mode") for node in found.findall("access")] == ["shared"]
    assert {node.get("memAccess") for node in made.findall("cpu/numa/cell")} == {"shared"}
    as_before = ET.fromstring(standby_xml.standby(xml, IMAGES, "s-1"))
    assert as_before.find("memoryBacking/source[@type='memfd']") is None


@pytest.mark.parametrize("kind", ["file", "memfd"])
def test_memory_that_is_shared_already_stays_where_it_is(kind: str) -> None:
    xml = XML.replace("<source type='file'/><access", f"<source type='{kind}'/><access")
    made = ET.fromstring(standby_xml.standby(xml, IMAGES, "s-1", shares_memory=True))
    assert [node.get("type") for node in made.findall("memoryBacking/source")] == [kind]


def test_a_standby_waits_for_memory_behind_what_its_qemu_is_told_already() -> None:
    assert arguments(MADE[0]) == ["-msg", "timestamp=on", "-incoming", "defer"]
    assert arguments(standby_xml.standby(SMALL, {}, "5e55")) == ["-incoming", "defer"]


def test_the_stored_guest_would_not_wait() -> None:
    assert arguments(MADE[1]) == ["-msg", "timestamp=on"]
    assert standby_xml.marked(MADE[1]) is None


@pytest.mark.parametrize("xml", MADE, ids=["standby", "clean"])
def test_replicated_disks_are_its_own_and_others_as_they_were(xml: str) -> None:
    disks = {
        one.find("target").get("dev"): one  # type: ignore[union-attr]
        for one in ET.fromstring(xml).findall("devices/disk")
    }
    for name, path in IMAGES.items():
        source = disks[name].find("source")
        assert source is not None
        assert (disks[name].get("type"), source.attrib) == ("file", {"file": path})
        assert disks[name].find("backingStore") is None
    assert disks["vda"].find("driver[@cache='none']") is not None
    assert disks["vdc"].find("source[@file='/srv/other.raw']") is not None
    assert disks["sda"].find("source") is None


@pytest.mark.parametrize("xml", MADE, ids=["standby", "clean"])
def test_all_else_stays_as_it_is(xml: str) -> None:
    root = ET.fromstring(xml)

    assert root.get("id") is None
    assert len(root.findall("cpu/numa/cell[@memAccess='shared']")) == 2
    assert root.find("metadata/{urn:vmckpt:labels:1}labels") is not None
    assert root.find("memoryBacking/access[@mode='shared']") is not None
    assert f'xmlns:qemu="{standby_xml.QEMU}"' in xml
    assert len(root.findall("devices/interface")) == 3


def test_every_card_of_a_standby_is_unplugged_and_has_no_name_of_this_host() -> None:
    cards = ET.fromstring(MADE[0]).findall("devices/interface")

    links = [[link.get("state") for link in card.findall("link")] for card in cards]
    assert links == [["down"]] * 3
    targets = [[one.get("dev") for one in card.findall("target")] for card in cards]
    assert targets == [[], [], ["tap-web1"]]


def test_a_running_standby_s_cards_are_told_plugged_in_and_whole() -> None:
    cards = [ET.fromstring(one) for one in standby_xml.plugged(MADE[0])]

    assert [card.tag for card in cards] == ["interface"] * 3
    links = [[link.get("state") for link in card.findall("link")] for card in cards]
    assert links == [["up"]] * 3
    assert cards[0].find("mac[@address='52:54:00:00:00:01']") is not None
    assert standby_xml.plugged(SMALL) == []


def test_a_standby_is_known_by_its_mark() -> None:
    assert standby_xml.marked(MADE[0]) == "5e55"
    assert standby_xml.marked(standby_xml.standby(SMALL, {}, "other")) == "other"
    assert standby_xml.marked(XML) is None
    assert standby_xml.marked("<domain><metadata><standby session='x'/></metadata></domain>") is (
        None
    )


def test_disks_without_name_or_source_are_left_alone() -> None:
    odd = """<domain><devices><disk type='file'><source file='/x'/></disk>
        <disk type='file'><target dev='vda'/></disk><disk/></devices></domain>"""
    for made in (standby_xml.standby(odd, IMAGES, "s"), standby_xml.clean(odd, IMAGES)):
        disks = ET.fromstring(made).findall("devices/disk")
        assert [one.find("source") is not None for one in disks] == [True, False, False]
        assert "/srv/b" not in made


@pytest.mark.parametrize("wrong", ["", "no XML", "<domain>", "<pool/>", "<a><domain/></a>"])
def test_what_is_no_domain_is_refused(wrong: str) -> None:
    for call in (
        lambda: standby_xml.standby(wrong, {}, "s"),
        lambda: standby_xml.clean(wrong, {}),
        lambda: standby_xml.plugged(wrong),
        lambda: standby_xml.marked(wrong),
    ):
        with pytest.raises((ValueError, ET.ParseError)):
            call()


def test_owners_of_shared_images_are_left_alone_and_of_no_others() -> None:
    before = XML.replace(
        "<source file='/srv/two.raw'/>",
        "<source file='/srv/two.raw'><seclabel model='dac'><label>x</label></seclabel></source>",
    )
    root = ET.fromstring(standby_xml.with_owners_kept(before, {"vda", "vdb", "sda"}))
    labels = {
        str(disk.find("target").get("dev")): [one.attrib for one in disk.iter("seclabel")]  # type: ignore[union-attr]
        for disk in root.findall("devices/disk")
    }
    assert labels == {
        "vda": [],  # on the network
        "vdb": [{"model": "dac", "relabel": "no"}],
        "vdc": [],
        "sda": [],  # empty
    }
    assert standby_xml.with_owners_kept(XML, set()) == XML


@pytest.mark.parametrize(
    "make",
    [
        lambda xml: standby_xml.clean(xml, {"vdb": "/new.raw"}),
        lambda xml: standby_xml.standby(xml, {"vdb": "/new.raw"}, "s"),
        lambda xml: storage.with_images_at(xml, {"vdb": "/new.raw"}),
        lambda xml: storage.with_images_at(xml, {"vdb": "/srv/two.raw"}),
    ],
)
def test_a_new_image_is_given_to_qemu_whatever_was_said_of_the_one_before(
    make: Callable[[str], str],
) -> None:
    kept = standby_xml.with_owners_kept(XML, {"vdb", "vdc"})
    made = ET.fromstring(make(kept))
    labels = {
        node.find("target").get("dev"): len(list(node.iter("seclabel")))  # type: ignore[union-attr]
        for node in made.findall("devices/disk")
    }
    assert (labels["vdb"], labels["vdc"]) == (0, 1)
