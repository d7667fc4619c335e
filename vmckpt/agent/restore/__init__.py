"""Restore a guest on this host from a snapshot, and undo a restore that was interrupted."""
