"""The disks of a protected guest: its writes are logged, sent, and applied to the standby."""
