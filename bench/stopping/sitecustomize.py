"""Loaded by every Python process whose PYTHONPATH contains this directory; see bench/points.py."""

from bench.points import install

install()
