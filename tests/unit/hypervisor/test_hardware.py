"""The hardware that a definition describes: what the guest sees, and nothing else."""

import pytest

from tests.support import foreign
from vmckpt.hypervisor import hardware
from vmckpt.replication.backup import standby_xml
from vmckpt.replication.test_failover import domain_xml as test_copy
from vmckpt.snapshot.restore import domain_xml as restore_xml

FIXED = foreign.text("fork-all-resources-fixed")

STORED = """
<domain type='kvm'>
  <name>web1</name><uuid>0d6f7a57-be04-4dd1-80ff-c8e5fa28580b</uuid>
  <metadata><x xmlns='urn:x'/></metadata>
  <memory unit='KiB'>1048576</memory><vcpu placement='static'>4</vcpu>
  <os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type><boot dev='hd'/></os>
  <features><acpi/><apic/><hyperv mode='custom'><relaxed state='on'/><vapic state='off'/></hyperv>
    <smm state='on'/></features>
  <cpu mode='custom' match='exact' check='partial'><model fallback='allow'>Haswell</model>
    <topology sockets='2' cores='2' threads='1'/><feature policy='disable' name='vmx'/></cpu>
  <clock offset='utc'><timer name='rtc' tickpolicy='catchup'/></clock>
  <on_reboot>restart</on_reboot>
  <devices>
    <disk type='file' device='disk'><driver name='qemu' type='qcow2' cache='none'/>
      <source file='/s/web1.qcow2'/><target dev='sda' bus='scsi'/><serial>A1</serial>
      <boot order='1'/><address type='drive' unit='0'/></disk>
    <disk type='file' device='cdrom'><driver name='qemu' type='raw'/>
      <target dev='sdb' bus='sata'/><readonly/></disk>
    <controller type='scsi' index='0' model='virtio-scsi'><driver queues='2'/></controller>
    <controller type='pci' index='0' model='pcie-root'/>
    <controller type='pci' index='1' model='pcie-root-port'><target chassis='1' port='0x8'/>
      <address type='pci' slot='0x02'/></controller>
    <controller type='usb' index='0' model='piix3-uhci'/>
    <interface type='network'><mac address='52:54:00:00:00:01'/><source network='default'/>
      <model type='virtio'/><address type='pci' slot='0x03'/></interface>
    <serial type='file'><source path='/var/log/x'/><target type='isa-serial' port='0'>
      <model name='isa-serial'/></target></serial>
    <console type='file'><source path='/var/log/x'/><target type='serial' port='0'/></console>
    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
    <input type='tablet' bus='usb'/><input type='keyboard' bus='ps2'/>
    <sound model='ich9'/><graphics type='vnc' port='-1' autoport='yes'/>
    <video><model type='qxl' ram='65536' vram='65536' heads='1' primary='yes'/></video>
    <memballoon model='virtio'/><rng model='virtio'><backend model='random'>/dev/urandom</backend>
      </rng>
  </devices>
</domain>"""
RUNNING = STORED
for before, after in (
    ("<domain type='kvm'>", "<domain type='kvm' id='7'>"),
    ("<metadata><x xmlns='urn:x'/></metadata>", ""),
    ("check='partial'", "check='full'"),
    ("<feature policy='disable' name='vmx'/>",
     "<feature policy='disable' name='vmx'/><feature policy='require' name='hypervisor'/>"),
    ("<controller type='usb' index='0' model='piix3-uhci'/>", ""),
    ("<controller type='pci' index='0' model='pcie-root'/>", ""),
    ("<source network='default'/>",
     "<source network='default' bridge='virbr0' portid='1'/><target dev='vnet3'/>"
     "<mtu size='1500'/><alias name='net0'/><link state='down'/>"),
    ("<input type='keyboard' bus='ps2'/>", ""),
    ("port='-1' autoport='yes'", "port='5901' autoport='yes'"),
    ("cache='none'", "cache='writeback' discard='unmap'"),
    ("<source path='/var/log/x'/>", "<source path='/dev/pts/4'/>"),
    ("<address type='pci' slot='0x02'/>", ""),
    ("<driver name='qemu' type='raw'/>", "<driver name='qemu'/>"),
    ("name='org.qemu.guest_agent.0'/>",
     "name='org.qemu.guest_agent.0' state='connected'/><alias name='channel0'/>"),
    ("<on_reboot>restart</on_reboot>", "<seclabel type='dynamic' model='dac' relabel='yes'/>"),
    ("<hyperv mode='custom'><relaxed state='on'/><vapic state='off'/></hyperv>",
     "<hyperv mode='custom'><relaxed state='on'/></hyperv>"),
):  # fmt: skip
    assert before in RUNNING
    RUNNING = RUNNING.replace(before, after)


def test_a_running_guest_has_the_hardware_of_its_definition() -> None:
    assert hardware.differs(STORED, RUNNING) == ()
    assert hardware.differs(RUNNING, STORED) == ()


@pytest.mark.parametrize(
    ("before", "after", "part"),
    [
        ("model='virtio-scsi'", "model='lsilogic'", "controller scsi 0"),
        ("<driver queues='2'/>", "<driver queues='4'/>", "controller scsi 0"),
        (">Haswell<", ">Broadwell<", "CPU"),
        ("cores='2' threads='1'", "cores='1' threads='2'", "CPU"),
        ("<topology sockets='2' cores='2' threads='1'/>", "", "CPU"),
        ("policy='disable' name='vmx'", "policy='require' name='vmx'", "CPU"),
        ("<cpu mode='custom'", "<cpu mode='host-passthrough'", "CPU"),
        ("<relaxed state='on'/>", "<relaxed state='off'/>", "features"),
        ("<smm state='on'/>", "", "features"),
        ("<apic/>", "", "features"),
        ("tickpolicy='catchup'", "tickpolicy='delay'", "clock"),
        ("offset='utc'", "offset='localtime'", "clock"),
        ("type='qxl'", "type='virtio'", "video 0"),
        ("vram='65536'", "vram='16384'", "video 0"),
        ("<sound model='ich9'/>", "", "sound 0"),
        ("<sound model='ich9'/>", "<sound model='ich9'/><sound model='ac97'/>", "sound 1"),
        ("<input type='tablet' bus='usb'/>", "<input type='mouse' bus='usb'/>", "input tablet usb"),
        ("<input type='tablet' bus='usb'/>", "<input type='tablet' bus='usb'/>" * 2,
         "input tablet usb (2)"),
        ("type='isa-serial'", "type='pci-serial'", "serial port 0"),
        ("</target></serial>", "</target></serial><serial type='pty'><target port='1'/></serial>",
         "serial port 1"),
        ("<serial>A1</serial>", "<serial>A2</serial>", "disk sda"),
        ("<boot order='1'/>", "<boot order='2'/>", "disk sda"),
        ("bus='scsi'/>", "bus='sata'/>", "disk sda"),
        ("<boot dev='hd'/>", "<boot dev='cdrom'/>", "boot order"),
        ("/s/web1.qcow2", "/t/web1.qcow2", "disk sda"),
        ("00:00:01", "00:00:09", "network card 0"),
        ("slot='0x03'", "slot='0x07'", "network card 0"),
        ("<model type='virtio'/><address", "<model type='e1000e'/><address", "network card 0"),
        ("name='org.qemu.guest_agent.0'", "name='other'", "channel org.qemu.guest_agent.0"),
        ("<memballoon model='virtio'/>", "<memballoon model='none'/>", "memballoon"),
        ("<rng model='virtio'>", "<rng model='virtio-transitional'>", "rng 0"),
        ("pcie-root-port", "pcie-to-pci-bridge", "controller pci 1"),
        ("<name>", "<sysinfo type='smbios'><system><entry name='serial'>7</entry></system>"
         "</sysinfo><name>", "SMBIOS"),
        ("<name>", "<maxMemory slots='4' unit='KiB'>4194304</maxMemory><name>", "memory"),
        ("</devices>", "<vsock model='virtio'><cid auto='yes'/></vsock></devices>", "vsock"),
        ("</devices>", "<iommu model='intel'/></devices>", "iommu"),
    ],
)  # fmt: skip
def test_what_the_guest_sees_is_compared(before: str, after: str, part: str) -> None:
    assert before in STORED
    changed = STORED.replace(before, after)
    assert part in hardware.differs(changed, RUNNING)
    assert part in hardware.differs(RUNNING, changed)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<cpu mode='custom'", "<cpu mode='host-model'"),
        ("slot='0x02'", "slot='0x05'"),  # RUNNING does not say where it is
        ("<on_reboot>restart</on_reboot>", "<on_reboot>destroy</on_reboot>"),
        ("cache='none'", "cache='none' iothread='2'"),
        ("<memballoon model='virtio'/>", "<memballoon model='virtio'><stats period='5'/>"
         "</memballoon>"),
        ("</memory>", "</memory><memoryBacking><source type='memfd'/></memoryBacking>"),
        ("port='-1' autoport='yes'", "port='5999' autoport='no'"),
    ],
)  # fmt: skip
def test_what_is_the_hosts_is_not_compared(before: str, after: str) -> None:
    assert before in STORED
    assert hardware.differs(STORED.replace(before, after), RUNNING) == ()


def test_features_that_both_definitions_list_are_compared() -> None:
    other = RUNNING.replace("name='hypervisor'", "name='avx2'")
    assert hardware.differs(RUNNING, other) == ("CPU",)


MACS = ["52:54:00:00:00:99"]


def test_a_fork_and_a_standby_have_the_originals_hardware() -> None:
    fork = restore_xml.xml_for_fork(
        RUNNING, {"sda": "/s/fork.qcow2"}, name="fork", uuid="11111111-2222-3333-4444-555555555555",
        macs=MACS, link_up=False,
    )  # fmt: skip
    fork, _ = restore_xml.unshared(fork, {"sda"}, memory=True)
    assert hardware.differs(STORED, fork, identity=False) == ()
    assert hardware.differs(STORED, fork) == ("disk sda", "network card 0")
    standby = standby_xml.standby(RUNNING, {"sda": "/b/web1.qcow2"}, "5e55", shares_memory=True)
    assert hardware.differs(STORED, standby, identity=False) == ()
    copy = test_copy.copy(
        standby, name="t", uuid="11111111-2222-3333-4444-555555555555", session="5e55",
        disks={"sda": ("/b/new", "/run/s")},
    )  # fmt: skip
    assert hardware.differs(STORED, copy, identity=False) == ()


def test_what_a_fork_loses_is_not_hardware_that_it_needs() -> None:
    xml = FIXED.replace(
        "<devices>",
        "<memory unit='KiB'>8</memory><os><type arch='x86_64' machine='q35'>hvm</type></os>"
        "<devices>",
    )
    fork = restore_xml.xml_for_fork(
        xml, {}, name="fork", uuid="11111111-2222-3333-4444-555555555555", macs=MACS * 5,
        link_up=False,
    )  # fmt: skip
    changed, _ = restore_xml.unshared(fork, (), memory=True)
    assert hardware.differs(xml, changed, identity=False) == ()
