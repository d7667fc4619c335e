"""Real libvirt hosts on one machine, each in its own namespaces, for tests and demonstrations."""
