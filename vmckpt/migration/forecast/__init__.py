"""How long a migration will take, and which mode suits it."""
