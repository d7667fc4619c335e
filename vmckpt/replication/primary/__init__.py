"""The primary of a protected guest: captures and sends epochs, and buffers output meanwhile."""
