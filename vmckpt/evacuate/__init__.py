"""Emptying a host: who goes where, in which order, and the doing of it."""
