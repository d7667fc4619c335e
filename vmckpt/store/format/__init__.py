"""What the objects of a store consist of."""
