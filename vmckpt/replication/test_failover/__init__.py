"""Failover test: run a copy of a standby while the protection continues."""
