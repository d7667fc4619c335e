"""Verify snapshots: by their checksums, by reading all of them, or by booting them."""
