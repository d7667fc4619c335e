"""Scripts that are sent to hosts. Each script needs only Python's standard library."""
