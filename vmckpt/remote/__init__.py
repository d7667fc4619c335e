"""The only room that knows paramiko: verified host keys, commands, and one look at a host."""
