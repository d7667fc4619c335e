"""Whether a host is fit for vmckpt: `checks` decides (pure), `gather` asks."""
