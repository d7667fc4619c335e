"""vmckpt snapshot."""
