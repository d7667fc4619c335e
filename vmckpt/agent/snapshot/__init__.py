"""Create a snapshot of a guest on this host, and undo one that was interrupted."""
