"""The agent: runs on a host beside QEMU, receives one order as JSON, and carries it out."""
