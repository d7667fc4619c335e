"""Data that all packages share: frozen classes and a few protocols. Standard library only."""
