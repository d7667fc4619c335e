"""Keys of a store: who can read snapshots, and which signatures count."""
