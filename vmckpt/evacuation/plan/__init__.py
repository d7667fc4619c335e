"""Plan an evacuation: the target of each guest, and a forecast of the run."""
