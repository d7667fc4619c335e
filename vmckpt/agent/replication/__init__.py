"""The agent of a protected guest: its primary, its standby, and what is left of either."""
