"""What was asked for, what was seen and what was decided: one SQLite file, several readers."""
