"""Ends a guest that may have lost its lease, or whose agent has died."""
