"""The agent: runs on a host beside QEMU, and carries out one order, given as lines of JSON."""
