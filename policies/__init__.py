"""The policies shipped with vmckpt, as package data."""
