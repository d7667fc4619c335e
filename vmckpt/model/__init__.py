"""What the rooms talk about: frozen data and a few ports. Standard library only."""
