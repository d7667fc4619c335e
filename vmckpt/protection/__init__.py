"""Protect a guest with a standby on another host: the controller's part."""
