"""The snapshot store: chunks, packs, verifiable manifests, and their keys."""
