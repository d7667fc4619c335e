"""The NBD protocol: client, server, and what both have in common."""
