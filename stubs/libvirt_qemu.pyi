"""What vmckpt.hypervisor uses of libvirt's calls that only QEMU has."""

from libvirt import virDomain

def qemuMonitorCommand(domain: virDomain, cmd: str, flags: int = 0) -> str: ...
