"""Application services: the operations that the command line and the dashboard offer."""
