"""Restore a guest from a snapshot: checks, the definition, and the order to the host."""
