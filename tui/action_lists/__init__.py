"""What can be done in each view."""
