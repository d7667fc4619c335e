"""What runs by itself: the snapshots that policies ask for, until somebody stops it."""
