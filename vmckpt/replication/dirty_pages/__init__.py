"""Find the pages of a guest's memory that have changed since the last epoch."""
