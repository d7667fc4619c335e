"""Migrate a guest by epochs, as replication does."""
