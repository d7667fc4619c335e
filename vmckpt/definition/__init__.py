"""What a domain XML needs from its host, and what it contains that cannot be migrated."""
