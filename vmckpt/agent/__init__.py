"""What runs on a host beside QEMU: one order, told in lines of JSON, and then it ends."""
