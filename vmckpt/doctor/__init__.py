"""The checks of `vmckpt doctor`: `gather` collects facts, `checks` (pure) judges them."""
