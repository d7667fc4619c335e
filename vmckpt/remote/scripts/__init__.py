"""Programs that are sent to hosts. Each needs only Python's standard library."""
