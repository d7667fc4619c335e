"""The service behind `vmckpt run`: scheduled snapshots, and the failure detector."""
