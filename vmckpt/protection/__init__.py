"""Protect a guest by a standby on another host: the controller's part."""
