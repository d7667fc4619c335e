"""Settle a migration whose controller is gone."""
