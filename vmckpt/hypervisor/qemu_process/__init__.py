"""The QEMU process of a guest: identify it, and make system calls in it."""
