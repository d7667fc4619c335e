"""Metrics for Prometheus, alerts and webhooks."""
