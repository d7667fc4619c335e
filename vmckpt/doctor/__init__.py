"""Is a host fit for migrations? `checks` decides (pure), `gather` asks."""
