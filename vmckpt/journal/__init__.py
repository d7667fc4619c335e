"""The journal: operations, their events and decisions, and leases, in SQLite or PostgreSQL."""
