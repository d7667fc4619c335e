"""Create a snapshot of a guest of this host, and undo one that was interrupted."""
