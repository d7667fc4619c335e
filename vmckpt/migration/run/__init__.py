"""Run one migration: observe, decide, act."""
