"""Snapshots: taken, kept by a schedule, proved and restored."""
