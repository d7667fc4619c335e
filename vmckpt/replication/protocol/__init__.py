"""The protocol between the agents of the primary and the backup."""
