"""Snapshots of several guests at one point in time."""
