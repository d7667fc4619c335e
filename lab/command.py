"""Where the CLI finds `vmckpt lab`. Imports no other module of the lab. Pure data."""

from vmckpt.cli.commands import Place

LAB = Place(
    "cli",
    "app",
    "Create libvirt hosts on this machine for tests.",
    package="vmckpt_lab",
)
