"""What others are told by themselves: Prometheus when it asks, and whoever is paged."""
