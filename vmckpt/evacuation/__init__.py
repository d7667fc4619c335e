"""Evacuate a host: placement, order of the moves, and the run itself."""
