"""The watchdog of a protected guest: it kills a guest without a lease and restarts its agent."""
