"""ssh to hosts: commands, agents, facts, disk images, and fencing. Only this package uses paramiko.

The keys of hosts are always verified.
"""
