"""Capture the memory of a running guest as of one instant."""
