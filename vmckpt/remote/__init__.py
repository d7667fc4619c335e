"""The only package that uses paramiko: verified host keys, commands, and facts about a host."""
