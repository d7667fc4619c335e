"""Readers of foreign data, fed by a fuzzer; `python -m tests.fuzz TARGET --seconds N`."""
