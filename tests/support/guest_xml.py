"""A guest's definition, as libvirt tells it."""

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
