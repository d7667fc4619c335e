"""Continuous replication: epochs of a running guest, sent to a standby that can take over."""
