"""The commands of vmckpt snapshot."""
