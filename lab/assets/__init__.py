"""Files for lab guests: the init scripts, the prover's source, and parameters for TLS."""
