"""Policies: YAML files that say how operations are done, and which guest gets which one."""
