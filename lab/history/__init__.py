"""Histories of what clients of a guest saw, and whether they are linearizable."""
