"""The formats of the objects in a store."""
