"""Snapshots of several guests at one instant."""
