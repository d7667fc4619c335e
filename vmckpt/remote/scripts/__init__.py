"""Programs that are sent to hosts. Each needs nothing but Python's standard library."""
