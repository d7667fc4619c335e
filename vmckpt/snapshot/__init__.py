"""Snapshots: create, verify, restore, copy, prune and browse them."""
