"""A simulated fleet, kept in memory, for forecasts, tests and the dashboard's demonstration."""
