"""Access to hosts: ssh commands, agents, facts, disk images, and fencing.

Only this package uses paramiko. Host keys are always verified.
"""
