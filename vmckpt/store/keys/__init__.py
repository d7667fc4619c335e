"""The keys of a store: which keys open its snapshots, and which writers are trusted."""
