"""The journal: a record of operations, events, decisions and leases in SQLite or PostgreSQL."""
