"""The standby's side: stages epochs, commits them, and takes over."""
