"""What a restored guest is started as, and which definition is stored of it."""

from uuid import UUID
from xml.etree import ElementTree as ET

import pytest

from vmckpt.capture.disks import lazy_overlay
from vmckpt.errors import BadInput
from vmckpt.hypervisor import qemu_user
from vmckpt.snapshot.restore import domain_xml

XML = """<domain type='kvm' id='7'>
  <name>web1</name><uuid>9c2589bc-79bb-4e20-b3a6-c67a4d7cb79a</uuid>
  <genid>11111111-2222-3333-4444-555555555555</genid>
  <memory unit='KiB'>196608</memory><vcpu>2</vcpu>
  <os><type arch='x86_64' machine='pc-i440fx-7.2'>hvm</type></os>
  <cpu mode='custom'><model>qemu64</model></cpu>
  <clock offset='utc'/>
  <devices>
    <disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='/s/web1.qcow2'/>
      <backingStore type='file'/><target dev='vda' bus='virtio'/></disk>
    <disk type='file' device='cdrom'><target dev='sda' bus='sata'/></disk>
    <interface type='network'><mac address='52:54:00:00:00:01'/>
      <source network='default' bridge='virbr0'/><target dev='vnet0'/><model type='virtio'/>
    </interface>
  </devices>
</domain>"""
FORK = domain_xml.xml_for_fork(
    XML, {"vda": "/s/fork-vda.qcow2"}, name="fork", uuid="u-1", macs=["52:54:00:00:00:02"],
    link_up=False,
)  # fmt: skip


def test_a_fork_gets_a_new_generation_id_and_keeps_its_clock() -> None:
    root, before = ET.fromstring(FORK), ET.fromstring(XML)
    new, old = root.findtext("genid"), before.findtext("genid")
    assert new is not None
    assert str(UUID(new)) != old
    clock = root.find("clock")
    assert clock is not None
    assert clock.attrib == {"offset": "utc"}
    assert (root.findtext("name"), root.get("id")) == ("fork", None)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ((" ", " "), ()),
        # What only a stored definition has, or libvirt fills in by itself, is no difference.
        (("<cpu mode='custom'><model>qemu64</model></cpu>", "<cpu mode='host-model'/>"), ()),
        (("<source network='default' bridge='virbr0'/>", "<source network='default'/>"), ()),
        (("<clock", "<on_reboot>restart</on_reboot><clock"), ()),
        (("/s/web1.qcow2", "/t/web1.qcow2"), ("disk vda",)),
        (("'qcow2'", "'raw'"), ("disk vda",)),
        (("196608", "393216"), ("memory",)),
        (("<vcpu>2", "<vcpu>4"), ("processors",)),
        (("pc-i440fx-7.2", "pc-i440fx-9.0"), ("machine",)),
        (("00:00:01", "00:00:09"), ("network card 0",)),
        (("<clock", "<devices2/><clock"), ()),
        (("  </devices>", "<tpm model='tpm-crb'/></devices>"), ("tpm",)),
    ],
)
def test_a_stored_definition_gives_way_only_to_other_hardware(
    change: tuple[str, str], parts: tuple[str, ...]
) -> None:
    stored = XML.replace(*change)
    assert domain_xml.differs(stored, XML) == parts
    assert domain_xml.wanted(stored, XML) == (XML if parts else None)


def test_a_definition_that_is_missing_is_made() -> None:
    assert domain_xml.wanted(None, XML) == XML


def test_a_guest_is_started_on_what_is_behind_its_empty_images() -> None:
    sockets = {"vda": "/run/x/vda.nbd"}
    told = lazy_overlay.behind(XML, sockets)
    disk = ET.fromstring(told).find("devices/disk")
    assert disk is not None
    driver = disk.find("driver")
    assert driver is not None
    assert (driver.get("error_policy"), driver.get("rerror_policy")) == ("stop", "stop")
    stores = disk.findall("backingStore")
    assert [one.get("type") for one in stores] == ["network"]
    assert lazy_overlay.waiting(told, sockets) == {"vda"}
    assert lazy_overlay.waiting(told, {"vda": "/run/y/vda.nbd"}) == frozenset()
    assert lazy_overlay.waiting(XML, sockets) == frozenset()
    with pytest.raises(ValueError, match="no disk vdb"):
        lazy_overlay.behind(XML, {"vdb": "/run/x/vdb.nbd"})


def test_only_qcow2_can_fill_up_while_it_is_used() -> None:
    lazy_overlay.require_overlay_support({"vda": "qcow2"})
    with pytest.raises(BadInput, match="disk vdb is raw"):
        lazy_overlay.require_overlay_support({"vda": "qcow2", "vdb": "raw"})


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("<secmodel><model>dac</model><baselabel type='kvm'>+64055:+108</baselabel></secmodel>",
         (64055, 108)),
        ("<secmodel><model>apparmor</model></secmodel>", (0, 0)),
        ("", (0, 0)),
    ],
)  # fmt: skip
def test_qemus_user_is_in_libvirts_capabilities(model: str, found: tuple[int, int]) -> None:
    assert qemu_user.owner_in(f"<capabilities><host>{model}</host></capabilities>") == found
