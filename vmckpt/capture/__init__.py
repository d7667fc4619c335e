"""Capture one consistent state of a running guest: memory, devices, disks and firmware."""
