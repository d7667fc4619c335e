"""What a migration needs, and every reason against it, before it begins."""
