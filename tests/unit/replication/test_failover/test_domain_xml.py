"""The description of a copy that runs for a test."""

from xml.etree import ElementTree as ET

import pytest

from vmckpt.hypervisor import domain_xml
from vmckpt.model.guest import GuestState
from vmckpt.replication.backup import standby_xml
from vmckpt.replication.test_failover import domain_xml as test_failover_domain_xml

Q = f"{{{standby_xml.QEMU}}}"
UUID = "11111111-2222-3333-4444-555555555555"
XML = """
<domain type='kvm'>
  <name>web1</name>
  <uuid>0d6f7a57-be04-4dd1-80ff-c8e5fa28580b</uuid>
  <genid>0d6f7a57-be04-4dd1-80ff-c8e5fa28580c</genid>
  <metadata><v:labels xmlns:v='urn:vmckpt:labels:1'><v:label name='tier'/></v:labels></metadata>
  <memory unit='KiB'>262144</memory>
  <os><type>hvm</type><nvram template='/usr/VARS.fd'> /srv/web1_VARS.fd </nvram></os>
  <devices>
    <disk type='file' device='disk'><driver name='qemu' type='raw' cache='none'/>
      <source file='/srv/web1.raw' index='1'/><target dev='vda' bus='virtio'/>
      <address type='pci' slot='0x05'/></disk>
    <disk type='file' device='cdrom'><source file='/srv/cd.iso'/><target dev='sda'/><readonly/>
      </disk>
    <interface type='network'><mac address='52:54:00:00:00:01'/><source network='guests'/>
      <virtualport/><target dev='tap-web1'/><model type='virtio'/><mtu size='9000'/>
      <driver name='qemu' queues='2'/><link state='up'/><filterref filter='clean'/>
      <address type='pci' slot='0x03'/></interface>
    <interface type='bridge'><source bridge='br0'/><model type='e1000'/></interface>
    <serial type='file'><source path='/var/log/web1.console' append='on'/>
      <log file='/var/log/web1.log'/><target port='0'/><alias name='serial0'/></serial>
    <serial type='tcp'><source mode='bind' host='0.0.0.0' service='4555'/>
      <protocol type='telnet'/><target port='1'/></serial>
    <console type='pty' tty='/dev/pts/4'><source path='/dev/pts/4'/>
      <target type='serial' port='0'/></console>
    <channel type='unix'><source mode='bind' path='/var/lib/agent.sock'/>
      <target type='virtio' name='org.qemu.guest_agent.0'/></channel>
    <channel type='spicevmc'><target type='virtio' name='com.redhat.spice.0'/></channel>
    <graphics type='vnc' port='5901' autoport='no' websocket='5701' passwd='x'>
      <listen type='address' address='127.0.0.1'/></graphics>
    <graphics type='spice' port='5902' tlsPort='5903'><listen type='socket' socket='/run/s'/>
      </graphics>
    <graphics type='egl-headless'/>
  </devices>
</domain>
"""
STANDBY = standby_xml.standby(XML, {"vda": "/srv/b/web1-vda.raw"}, "5e55")
DISKS = {"vda": ("/srv/b/.web1-vda.raw.vmckpt-test-new", "/dev/shm/disks.sock")}


def made(xml: str = STANDBY, nvram: str | None = "/srv/own_VARS.fd") -> ET.Element:
    return ET.fromstring(
        test_failover_domain_xml.copy(
            xml, name="web1-test", uuid=UUID, session="5e55", disks=DISKS, nvram=nvram
        )
    )


def test_it_has_a_name_and_ids_of_its_own() -> None:
    root = made()
    assert (root.findtext("name"), root.findtext("uuid")) == ("web1-test", UUID)
    assert root.findtext("genid") not in ("", "0d6f7a57-be04-4dd1-80ff-c8e5fa28580c")
    assert root.findtext("os/nvram") == "/srv/own_VARS.fd"
    assert test_failover_domain_xml.firmware(STANDBY) == "/srv/web1_VARS.fd"
    assert test_failover_domain_xml.firmware("<domain/>") is None


def test_it_waits_once_and_is_no_standby() -> None:
    root = made()
    words = [one.get("value") for one in root.findall(f"{Q}commandline/{Q}arg")]
    assert words == ["-incoming", "defer"]
    assert domain_xml.standby_of(root) is None


@pytest.mark.parametrize("state", [1, 3])
def test_it_is_known_as_a_test_whatever_it_does(state: int) -> None:
    text = ET.tostring(made(), encoding="unicode")
    told = domain_xml.guest(
        text, state=state, persistent=False, autostart=False, snapshots=0, job=None
    )
    assert told.state is GuestState.TEST
    assert not told.state.is_active
    assert told.labels == {}  # schedules go by them
    assert domain_xml.test_of(made()) == "web1"
    assert domain_xml.test_of(ET.fromstring(XML)) is None


def test_its_disk_is_an_image_over_what_is_served() -> None:
    (disk, cd) = made().findall("devices/disk")
    source, store = disk.find("source"), disk.find("backingStore")
    assert source is not None
    assert store is not None
    assert source.attrib == {"file": "/srv/b/.web1-vda.raw.vmckpt-test-new"}
    assert disk.find("driver[@type='qcow2'][@cache='none']") is not None
    assert store.find("source[@protocol='nbd'][@name='vda']") is not None
    assert store.find("source/host[@socket='/dev/shm/disks.sock']") is not None
    assert disk.find("address[@slot='0x05']") is not None
    assert cd.find("source[@file='/srv/cd.iso']") is not None


def test_its_cards_are_the_same_to_it_and_are_plugged_in_nowhere() -> None:
    cards = made().findall("devices/interface")
    assert [card.get("type") for card in cards] == ["ethernet"] * 2
    assert sorted(node.tag for node in cards[0]) == [
        "address", "driver", "link", "mac", "model", "mtu",
    ]  # fmt: skip
    assert [[link.get("state") for link in card.findall("link")] for card in cards] == [
        ["down"], ["down"],
    ]  # fmt: skip
    text = ET.tostring(made(), encoding="unicode")
    for where in ("br0", "guests'", "tap-web1", "clean"):
        assert where not in text


def test_its_consoles_and_screens_are_its_own() -> None:
    root = made()
    serials = [*root.findall("devices/serial"), *root.findall("devices/console")]
    assert [one.get("type") for one in serials] == ["pty"] * 3
    assert all(one.find("source") is None and one.find("log") is None for one in serials)
    assert all(one.get("tty") is None for one in serials)
    agent, spice = root.findall("devices/channel")
    assert (agent.get("type"), spice.get("type")) == ("unix", "spicevmc")
    assert agent.find("source[@path]") is None
    vnc, spice_screen, headless = root.findall("devices/graphics")
    assert (vnc.get("autoport"), vnc.get("port"), vnc.get("websocket")) == ("yes", None, "-1")
    assert vnc.get("passwd") == "x"
    assert (spice_screen.get("autoport"), spice_screen.get("tlsPort")) == ("yes", None)
    assert spice_screen.find("listen[@socket]") is None
    assert headless.attrib == {"type": "egl-headless"}
    text = ET.tostring(root, encoding="unicode")
    for taken in ("web1.console", "web1.log", "4555", "agent.sock", "5901", "/run/s"):
        assert taken not in text


@pytest.mark.parametrize("wrong", ["", "<pool/>", "<domain><name>x</name></domain>"])
def test_what_is_no_guest_is_refused(wrong: str) -> None:
    with pytest.raises((ValueError, ET.ParseError)):
        made(wrong, nvram=None)
