"""Utilities for strict YAML, atomic writes, directories that other users may own, plug-ins, signals
and threads.
"""
