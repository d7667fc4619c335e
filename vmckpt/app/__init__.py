"""Application services: what the command line and the dashboard may do."""
