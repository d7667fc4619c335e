"""The watchdog: kills a protected guest when its lease ends, and restarts the primary's agent."""
