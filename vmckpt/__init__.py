"""Live migration, replication and snapshots of QEMU/KVM guests under libvirt."""

__version__ = "0.1.0"
