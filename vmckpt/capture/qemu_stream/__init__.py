"""File formats of QEMU and libvirt: migration streams, save images, ELF cores."""
