"""The actions of each part of the dashboard."""
