"""The backup of a protected guest: stages epochs, commits them, and takes over."""
