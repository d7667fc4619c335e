"""The store: chunks, packs and manifests that can be proved, and the keys that open them."""
