"""What runs on a host beside QEMU: it carries out one order, given in lines of JSON."""
