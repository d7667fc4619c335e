"""Recover a migration whose controller is gone."""
