"""Which pages of a guest's memory have changed since the last epoch."""
