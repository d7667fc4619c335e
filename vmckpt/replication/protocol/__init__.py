"""What both sides say to each other."""
