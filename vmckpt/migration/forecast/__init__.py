"""Forecast how long a migration takes, and choose its mode."""
