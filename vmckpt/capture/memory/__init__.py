"""Memory of a running guest at one point in time."""
