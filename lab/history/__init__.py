"""Record what clients of a guest see, and check that these histories are linearizable."""
