"""A program outside all hosts that observes guests over the network."""
