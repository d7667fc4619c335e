"""The NBD protocol: a client, a read-only server, and their common parts."""
