"""A fleet in memory, for forecasts, tests and the dashboard's demonstration."""
