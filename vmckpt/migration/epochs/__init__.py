"""Migrate a guest in mode checkpoint, which copies it in epochs, as replication does."""
