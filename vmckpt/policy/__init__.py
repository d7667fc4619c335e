"""Policies: YAML files that define how operations are carried out, and for which guests."""
