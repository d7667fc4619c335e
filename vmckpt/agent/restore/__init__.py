"""Restore a guest on this host from a snapshot, and undo an interrupted restore."""
