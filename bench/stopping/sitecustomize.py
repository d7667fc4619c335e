"""Found by each Python whose PYTHONPATH names this folder: see bench/points.py."""

from bench.points import install

install()
