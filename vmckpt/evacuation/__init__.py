"""Move all guests away from a host: placement, order, and the run itself."""
