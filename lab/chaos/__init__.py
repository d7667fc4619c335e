"""Campaigns of random faults."""
