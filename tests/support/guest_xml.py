"""What libvirt tells of a guest: its definition, and the statistics of its job."""

import libvirt

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


MANY_DEVICES = """
<domain type='kvm' id='3'>
  <name>db &lt;1&gt;</name>
  <uuid>0d6f7a57-be04-4dd1-80ff-c8e5fa28580b</uuid>
  <memory unit='KiB'>1048576</memory>
  <vcpu placement='static'>4</vcpu>
  <memoryBacking><source type='file'/><access mode='shared'/></memoryBacking>
  <os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type><loader>/fw.fd</loader>
    <kernel>/k</kernel></os>
  <cpu mode='host-model'/>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <disk type='file' device='disk'><driver name='qemu' type='raw' cache='none'/>
      <source file='/srv/a b.raw'/><target dev='vda'/></disk>
    <disk type='network' device='disk'><source protocol='rbd' name='pool/x'/>
      <target dev='vdb'/></disk>
    <disk type='file' device='cdrom'><target dev='sda'/><readonly/></disk>
    <interface type='network'><mac address='52:54:00:00:00:01'/>
      <source network='lan' bridge='virbr0'/></interface>
    <interface type='bridge'><source bridge='br0'/></interface>
    <interface type='hostdev'><mac address='52:54:00:00:00:02'/></interface>
    <hostdev mode='subsystem' type='pci'><source>
      <address domain='0x0000' bus='0x03' slot='0x00' function='0x0'/></source></hostdev>
    <filesystem type='mount'><source dir='/x'/><target dir='tag'/></filesystem>
  </devices>
</domain>
"""


def stats(**changes: int) -> dict[str, int | str | float | bool]:
    """Of a migration that goes out."""
    whole: dict[str, int | str | float | bool] = {
        "type": libvirt.VIR_DOMAIN_JOB_UNBOUNDED,
        "operation": libvirt.VIR_DOMAIN_JOB_OPERATION_MIGRATION_OUT,
        "memory_iteration": 3, "memory_page_size": 4096, "memory_dirty_rate": 5000,
        "memory_bps": 50_000_000, "data_remaining": 1000, "data_total": 2000,
        "data_processed": 9000, "downtime": 300,
    }  # fmt: skip
    return whole | changes
