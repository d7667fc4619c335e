"""The keys for a store: keys that decrypt its snapshots, and keys of trusted writers."""
