"""A program outside of all hosts that observes which copies of a guest run."""
