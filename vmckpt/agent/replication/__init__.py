"""The agents of a protection, on primary and backup, and the cleanup after them."""
