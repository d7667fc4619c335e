"""Plan a migration, and find all obstacles before it begins."""
