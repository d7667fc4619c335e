"""The QEMU process of a guest: identify it, and arm a kernel timer in it from outside."""
