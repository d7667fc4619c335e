"""Who may change a guest: leases, their tokens, and when a controller counts as gone."""
