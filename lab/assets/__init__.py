"""What goes into a lab guest: its first script and the prover."""
