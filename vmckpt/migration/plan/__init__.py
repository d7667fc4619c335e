"""Plan a migration, and find every reason against it before it begins."""
