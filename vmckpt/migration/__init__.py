"""Migrate one guest: plan, forecast, run, report and recover."""
