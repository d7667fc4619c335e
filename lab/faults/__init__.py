"""Faults that the lab can inject."""
