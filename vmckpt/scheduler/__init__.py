"""Work that runs by itself: the snapshots that policies ask for."""
