"""The watchdog: kills a protected guest when its lease ends, and restarts the guest's agent."""
