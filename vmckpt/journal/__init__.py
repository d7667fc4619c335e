"""The journal: what was asked for, observed and decided, in SQLite or PostgreSQL."""
