"""The formats of a store's objects."""
