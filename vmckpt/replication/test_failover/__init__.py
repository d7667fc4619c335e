"""Try a standby out while it goes on standing by."""
