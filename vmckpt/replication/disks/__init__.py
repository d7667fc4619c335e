"""Disks of a protected guest: its writes are logged, sent, and applied at the standby."""
