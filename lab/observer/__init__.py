"""A process outside all hosts that observes guests over the network."""
