"""Breaks safety-critical lines one at a time and checks that the unit tests notice."""
