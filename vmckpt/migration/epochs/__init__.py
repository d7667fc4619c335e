"""Migrate a guest in mode checkpoint: by epochs, as replication does."""
