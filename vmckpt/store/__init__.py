"""The snapshot store: chunks, packs, manifests that can be verified, and their keys."""
