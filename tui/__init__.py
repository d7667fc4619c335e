"""The dashboard. It shows only what vmckpt.app provides."""
