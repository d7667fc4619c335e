"""Takes over what controllers that are gone have left behind."""
