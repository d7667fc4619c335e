"""Formats that QEMU and libvirt write: migration streams, save images, ELF cores."""
