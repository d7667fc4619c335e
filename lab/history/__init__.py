"""Record histories of a guest's clients, and check whether the histories are linearizable."""
