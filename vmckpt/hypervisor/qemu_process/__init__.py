"""The QEMU process of a guest: which one it is, and what is done to it from outside."""
