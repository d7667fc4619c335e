"""Capturing one checkpoint of a running guest."""
