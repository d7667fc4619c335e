"""The snapshot store: chunks, packs, verifiable manifests and keys."""
