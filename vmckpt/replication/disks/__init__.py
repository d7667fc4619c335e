"""The disks of a protected guest: writes are logged, sent, and applied to the standby."""
