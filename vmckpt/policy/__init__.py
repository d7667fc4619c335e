"""How migrations are to be done: YAML files, and which of them holds for a guest."""
