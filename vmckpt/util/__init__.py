"""Utilities for strict YAML, atomic writes, and directories that other users may own."""
